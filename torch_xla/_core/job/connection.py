"""A connection to the processes of a job: meetings, what this process waits for, who has ended, why the job stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from torch_xla import _bindings, _config
from torch_xla._core.device import client, environment
from torch_xla._core.graph import sequence
from torch_xla._core.job import orphans, pending_collectives, program_starts, store, tries
from torch_xla._core.job.waits import Ranks, Wait, line, until
from torch_xla._errors import JobError

_PAUSES = (0.0002, 0.02)  # seconds between two looks at a meeting, at first and at most


class Connection:
    """The connection of this process to its job.

    `stopped` says why nothing can be done together any more, if so; `orphaned` whether that is since nobody waits for
    this process; `over` is set when this process has told the others that it has ended. Where it is
    `imagined` the other processes are not there.
    """

    imagined = False

    def __init__(self, rank_info: environment.RankInfo) -> None:
        self.rank_info = rank_info
        self.stopped: str | None = None
        self.orphaned = False
        self.over = threading.Event()
        self.everyone: Ranks = tuple(range(rank_info.world))
        self._groups: dict[Ranks, Any] = {}
        self._meetings: Counter[tuple[str, Ranks]] = Counter()
        self._waits: list[Wait] = []
        self._left = self._lost = False
        self._published: dict[str, str] = {}
        self._publishing = threading.Lock()
        self._pid = os.getpid()
        self.members: list[dict[str, Any]] = []
        whole = store.connect(rank_info, serves=rank_info.rank == 0 and not rank_info.served)
        self._prefix = f"torch_xla/{tries.name_of_try(whole, rank_info.rank, rank_info.world, 'job')}"
        self.store = store.prefix(self._prefix, whole)
        self._group_store = self.new_store()  # groups wait in it

    def join(self) -> None:
        """Meets the others for the first time; JobError where somebody does not come, or they are not of one job."""
        self._handshake()
        _bindings.set_collective_rank(self.rank_info.rank)
        self.group(self.everyone)

    def _handshake(self) -> None:
        """Tells who this is, and looks whether all are of one job."""
        identity = {
            "torch_xla": version("torch_xla"),
            "device": client.device_type(),
            "machine": _machine(),
            "pid": self._pid,
        }
        if self.store.check(["joined"]):
            self._lost = True  # a job that goes on without this process, and is told nothing of it
            where = f"{self.rank_info.address}:{self.rank_info.port}"
            self.stop(f"[job] a job runs already at {where}; set MASTER_PORT to another port")
            self.check()
        world = self.store.compare_set("processes", "", str(self.rank_info.world)).decode()
        if world != str(self.rank_info.world):
            self.fail(
                f"[job] rank {self.rank_info.rank} has WORLD_SIZE={self.rank_info.world}, another process {world}; it "
                "must be the same everywhere"
            )
        if self.store.add(f"taken/{self.rank_info.rank}", 1) > 1:
            self.fail(f"[job] two processes are rank {self.rank_info.rank} of the job at {self.rank_info.address}")
        identities = self.meet("start", self.everyone, "the start of the job", json.dumps(identity).encode())
        members = [json.loads(text) for text in identities]
        for name in ("torch_xla", "device"):
            for rank, other in enumerate(members):
                if other[name] != members[0][name]:
                    self.fail(f"[job] rank {rank} has {name}={other[name]}, rank 0 has {name}={members[0][name]}")
        self.members = members
        self.store.set("joined", "")

    # Meeting.

    def meet(self, name: str, ranks: Ranks, what: str, payload: bytes = b"") -> list[bytes]:
        """Waits until these processes, this one among them, are at a meeting point, and exchanges bytes.

        `what` says in the user's words what this process comes for. Gives the payloads, by place in `ranks`; raises
        JobError where somebody cannot come.
        """
        self.check()
        pending_collectives.run()
        self._meetings[name, ranks] += 1
        count = self._meetings[name, ranks]
        key = f"meet/{name}/{'.'.join(map(str, ranks))}/{count}"
        limit = None if self.members else _config.XLA_JOB_START_TIMEOUT.get()

        def all_here() -> bool | None:
            self.check_launcher()
            return self.store.add(key, 0) >= len(ranks) or None

        with self.asking():
            self.store.set(f"{key}/{self.rank_info.rank}", payload)
            self.store.add(key, 1)
            with self.waiting(Wait(ranks, what, count, f"{name!r}", limit=limit)):
                until(all_here, *_PAUSES)
            payloads = [self.store.get(f"{key}/{rank}") for rank in ranks]
            if self.store.add(f"{key}/read", 1) == len(ranks):
                for entry in (key, f"{key}/read", *(f"{key}/{rank}" for rank in ranks)):
                    self.store.delete_key(entry)
        return payloads

    def compare(self, ranks: Ranks, entries: Sequence[sequence.Entry], purpose: str, copies: Any = None) -> list[Any]:
        """Compares what these processes are about to run; `purpose` says for what, for those who see this one wait.

        Gives the copies of all of them, in the order of ranks. Raises JobError in all where they differ.
        """
        digest = hashlib.sha256("\n".join(text for text, _ in entries).encode()).hexdigest()
        payloads = self.meet("program", ranks, purpose, json.dumps([digest, copies]).encode())
        replies = [json.loads(text) for text in payloads]
        differing = next((place for place, (other, _) in enumerate(replies) if other != replies[0][0]), None)
        if differing is not None:
            lists = [json.loads(text) for text in self.meet("text", ranks, purpose, json.dumps(entries).encode())]
            both = lists[0], lists[differing]
            pairs = itertools.zip_longest(*([text for text, _ in those] for those in both))
            first = next(i for i, (one, other) in enumerate(pairs) if one != other)
            sides = [those[first] if first < len(those) else ("no more", those[-1][1]) for those in both]
            self.fail(sequence.difference((ranks[0], sides[0]), (ranks[differing], sides[1])))
        return [reply for _, reply in replies]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A scope that asks the store: JobError where that does not answer."""
        try:
            yield
        except JobError:
            raise
        except RuntimeError as error:
            raise self.lost(error) from None

    def group(self, ranks: Ranks) -> Any:
        """PyTorch's process group of some processes for values on the host, in the given order.

        Raises JobError where somebody cannot come.
        """
        process_group = self._groups.get(ranks)
        if process_group is None:
            name = "group/" + ".".join(map(str, ranks))
            self.meet(name, ranks, "the first collective of a group")
            group_store, place = store.prefix(name, self._group_store), ranks.index(self.rank_info.rank)
            timeout = timedelta(seconds=_config.XLA_COLLECTIVE_TIMEOUT.get() + 60)
            process_group = self._groups[ranks] = store.host_group(group_store, place, len(ranks), timeout)
            _bindings.add_collective_group(list(ranks), process_group)
        return process_group

    def new_store(self) -> Any:
        """A new connection to the store, for a caller that blocks in it: a connection answers one request at a time."""
        return store.prefix(self._prefix, store.connect(self.rank_info, serves=False))

    # What the others see of this process, and it of them.

    def publish(self, name: str, make: Callable[[], str]) -> None:
        """Publishes a value of this process for the others, if it changed."""
        with self._publishing:
            text = make()
            if text != self._published.get(name):
                self.store.set(f"{name}/{self.rank_info.rank}", text)
                self._published[name] = text

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """A scope in which this process waits for others, as they can see."""
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def wait_now(self) -> Wait | None:
        """The wait of this process, or None."""
        for wait in list(self._waits):
            return wait
        if (state := _bindings.collective_wait()) is None:
            return program_starts.under_way()
        ranks, what, count, seconds = state
        return Wait(tuple(ranks), what, count, since=time.monotonic() - seconds)

    def is_own(self) -> bool:
        """Whether this process made the connection, and was not forked from who did."""
        return self._pid == os.getpid()

    def read(self, key: str) -> str | None:
        """The value under a key of the store; None if there is none."""
        return store.read(self.store, key)

    def has_left(self, rank: int) -> str | None:
        """Why a process has ended, ``""`` where it had nothing more to do; None while it runs, as far as is known."""
        if (why := self.read(f"left/{rank}")) is not None:
            return why
        member = self.members[rank] if self.members else None
        if member is not None and member["machine"] == _machine() and not _runs(member["pid"]):
            return "it was killed"
        return None

    def end_of(self, rank: int) -> str | None:
        """Why a process has ended, in words; None while it runs, as far as is known."""
        why = self.has_left(rank)
        return None if why is None else f"[job] rank {rank} has ended ({why or 'its program was over'})"

    # Stopping.

    def check(self) -> None:
        """Raises JobError where the job has stopped."""
        if self.stopped is not None:
            raise JobError(self.stopped)

    def check_launcher(self) -> None:
        """The same, also where whoever started this process has ended; for those that look now and then."""
        if self.stopped is None and orphans.launcher_is_gone():
            self.lost()
        self.check()

    def stop(self, reason: str) -> None:
        """Stops the job in this process alone: its collectives and meetings fail, with this reason."""
        if self.stopped is None:
            self.stopped = reason
            _bindings.stop_collectives(reason)

    def fail(self, reason: str) -> None:
        """Stops the job in all processes, and raises JobError with the reason of whoever was first."""
        self.break_off(reason)
        raise JobError(self.stopped)

    def break_off(self, reason: str) -> None:
        """Stops the job in all processes; the reason of whoever was first is kept."""
        try:
            first = self.store.compare_set("broken", "", reason).decode()
            self.store.add("news", 1)
        except RuntimeError:
            first = reason
        self.stop(first)

    def lost(self, error: Exception | None = None) -> JobError:
        """The exception to raise when whoever started the processes has ended, or the store does not answer."""
        self._lost = self.orphaned = True
        who = "rank 0"
        if self.rank_info.served or error is None:
            who = f"whoever started the processes, and has {self.rank_info.address}:{self.rank_info.port},"
        wait = self.wait_now()
        doing = f"in {wait.what}, " if wait is not None else ""
        server = f"{self.rank_info.address}:{self.rank_info.port}"
        why = f" (lost the connection to {server}: {str(error).splitlines()[0]})" if error is not None else ""
        self.stop(f"[job] {who} has ended, and with it rank {self.rank_info.rank}, {doing}at {line()}{why}")
        return JobError(self.stopped)

    def leave(self, failure: BaseException | None = None) -> None:
        """Tells the others that this process has ended, and why if it failed."""
        if self._left:
            return
        self._left = True
        if failure is not None:
            client.leave_job()
        reason = f"{type(failure).__name__}: {failure}" if failure is not None else ""
        try:
            if self._lost:
                return
            if failure is not None and is_consequence(failure):
                self.store.set(f"followed/{self.rank_info.rank}", "")
            self.publish("ran", program_starts.report)
            store.tell_end(self.store, self.rank_info.rank, reason)
            if self.rank_info.rank == 0 and (not self.rank_info.served or client.is_connected()):
                # It has the store, or JAX's: the others need it until they have ended too.
                deadline = time.monotonic() + (10 if failure is not None else 86400)
                while time.monotonic() < deadline and not all(
                    self.has_left(rank) is not None or not self.store.check([f"taken/{rank}"]) for rank in self.everyone
                ):
                    if self.stopped is not None:
                        deadline = min(deadline, time.monotonic() + 10)
                    time.sleep(0.05)
        except RuntimeError:
            pass  # the store is gone, and with it who would read that
        finally:
            self.over.set()


def is_consequence(error: BaseException) -> bool:
    """Whether an error comes from what another process did."""
    failure: BaseException | None = error
    visited: set[int] = set()
    while failure is not None and id(failure) not in visited:
        if isinstance(failure, JobError):
            return True
        visited.add(id(failure))
        failure = failure.__cause__ or failure.__context__
    return False


def _machine() -> str:
    """An identity of the machine, or container, within which process numbers are valid."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not os.path.isdir("/proc/self")  # where nothing can be seen, it runs
