"""A connection to the processes of a job: the store at which they meet, their process groups, and why they stopped."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypeVar

from torch_xla import _bindings, _config
from torch_xla._core.device import client, environment
from torch_xla._core.job import pending, program_starts
from torch_xla._core.job.waits import Ranks, Wait, line
from torch_xla._errors import JobError, message

T = TypeVar("T")

_OUTPUT_ENDS = 1.0  # seconds
_PAUSES = (0.0002, 0.02)  # seconds between two looks at a meeting, at first and at most
LOCAL = ("localhost", "127.0.0.1", "::1")

# Stores and groups have threads, which a forked child does not, so that there they could not be ended: it keeps them,
# and those that the garbage collector has yet to find.
_made: weakref.WeakSet[Any] = weakref.WeakSet()
_forking: list[Any] = []
_kept: list[Any] = []

os.register_at_fork(
    before=lambda: _forking.extend(_made),
    after_in_parent=_forking.clear,
    after_in_child=lambda: _kept.extend(_forking),
)


def _own(made: T) -> T:
    _made.add(made)
    return made


class Session:
    """The connection of this process to its job.

    `stopped` says why nothing can be done together any more, if so; `over` is set when this process has told the others
    that it has ended.
    """

    def __init__(self, rank_info: environment.RankInfo) -> None:
        self.rank_info = rank_info
        self.stopped: str | None = None
        self.over = threading.Event()
        self.everyone: Ranks = tuple(range(rank_info.world))
        self._groups: dict[Ranks, Any] = {}
        self._meetings: Counter[tuple[str, Ranks]] = Counter()
        self._waits: list[tuple[Wait, float]] = []
        self._left = self._lost = False
        self._told = "[]"  # of the programs that this process has started with others
        self._telling = threading.Lock()
        self._pid = os.getpid()
        self.members: list[dict[str, Any]] = []
        self._server = connect(rank_info, serves=rank_info.rank == 0 and not rank_info.served)
        self.store = prefixed(self._server)
        # A client answers one request after the other, and groups wait in theirs.
        self._group_store = prefixed(connect(self.rank_info, serves=False))

    def join(self) -> None:
        """Meets the others for the first time; JobError where somebody does not come, or they are not of one job."""
        self._introduce()
        _bindings.set_collective_rank(self.rank_info.rank)
        self.group(self.everyone)

    def _introduce(self) -> None:
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
        members = [json.loads(text) for text in self.meet("start", self.everyone, json.dumps(identity).encode())]
        for name in ("torch_xla", "device"):
            for rank, other in enumerate(members):
                if other[name] != members[0][name]:
                    self.fail(f"[job] rank {rank} has {name}={other[name]}, rank 0 has {name}={members[0][name]}")
        self.members = members
        self.store.set("joined", "")

    # Meeting.

    def meet(self, name: str, ranks: Ranks, payload: bytes = b"", what: str | None = None) -> list[bytes]:
        """Waits until these processes, this one among them, are at a meeting point, and exchanges bytes.

        `what` says in words what this process comes for. Gives the payloads, by place in `ranks`; raises JobError where
        somebody cannot come.
        """
        self.check()
        pending.run()
        self._meetings[name, ranks] += 1
        count = self._meetings[name, ranks]
        key = f"meet/{name}/{'.'.join(map(str, ranks))}/{count}"
        try:
            self.store.set(f"{key}/{self.rank_info.rank}", payload)
            self.store.add(key, 1)
            limit = None if self.members else _config.XLA_JOB_START_TIMEOUT.get()
            with self.waiting(Wait(ranks, what or f"rendezvous {name!r}", count, limit=limit, place=f"{name!r}")):
                pause, most = _PAUSES
                while self.store.add(key, 0) < len(ranks):
                    self.check()
                    time.sleep(pause)
                    pause = min(1.5 * pause, most)
            payloads = [self.store.get(f"{key}/{rank}") for rank in ranks]
            if self.store.add(f"{key}/read", 1) == len(ranks):
                for entry in (key, f"{key}/read", *(f"{key}/{rank}" for rank in ranks)):
                    self.store.delete_key(entry)
        except RuntimeError as error:
            if isinstance(error, JobError):
                raise
            raise self.lost(error) from error
        return payloads

    def group(self, ranks: Ranks) -> Any:
        """PyTorch's process group of some processes for values on the host, in the given order.

        Raises JobError where somebody cannot come.
        """
        process_group = self._groups.get(ranks)
        if process_group is None:
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            name = "group/" + ".".join(map(str, ranks))
            self.meet(name, ranks)
            store = PrefixStore(name, self._group_store)
            timeout = timedelta(seconds=_config.XLA_COLLECTIVE_TIMEOUT.get() + 60)
            process_group = self._groups[ranks] = host_group(
                store, ranks.index(self.rank_info.rank), len(ranks), timeout
            )
            _bindings.add_collective_group(list(ranks), process_group)
        return process_group

    def new_store(self) -> Any:
        """A new connection to the store, for a caller that blocks in it: a connection answers one request at a time."""
        return prefixed(connect(self.rank_info, serves=False))

    def tell_programs(self) -> None:
        """Tells the others what this process has started with them."""
        with self._telling:
            report = program_starts.report()
            if report != self._told:
                self.store.set(f"ran/{self.rank_info.rank}", report)
                self._told = report

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """A scope in which this process waits for others, as they can see."""
        entry = (wait, time.monotonic())
        self._waits.append(entry)
        try:
            yield
        finally:
            self._waits.remove(entry)

    def wait_now(self) -> Wait | None:
        """What this process waits for."""
        for wait, since in list(self._waits):
            return replace(wait, seconds=time.monotonic() - since)
        state = _bindings.collective_wait()
        return Wait(tuple(state[0]), state[1], state[2], state[3]) if state else program_starts.under_way()

    # Stopping.

    def check(self) -> None:
        """Raises JobError where the job has stopped."""
        if self.stopped is not None:
            raise JobError(self.stopped)

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

    def lost(self, error: Exception) -> JobError:
        """What to raise where the store does not answer."""
        who = "whoever started the processes" if self.rank_info.served else "rank 0"
        self._lost = True
        wait = self.wait_now()
        doing = f"in {wait.what}, " if wait is not None else ""
        self.stop(
            f"[job] rank {self.rank_info.rank}, {doing}at {line()}, lost the connection to "
            f"{self.rank_info.address}:{self.rank_info.port}: {who} has ended ({str(error).splitlines()[0]})"
        )
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
            if failure is not None and follows(failure):
                self.store.set(f"followed/{self.rank_info.rank}", "")
            self.tell_programs()
            self.store.set(f"left/{self.rank_info.rank}", reason)
            self.store.add("news", 1)
            if self.rank_info.rank == 0 and (not self.rank_info.served or client.met()):
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

    def is_own(self) -> bool:
        """Whether this process made the connection, and was not forked from who did."""
        return self._pid == os.getpid()

    def read(self, key: str) -> str:
        """What the store has under a key; "" where there is nothing."""
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def has_left(self, rank: int) -> str | None:
        """Why a process has ended, ``""`` where it had nothing more to do; None while it runs, as far as is known."""
        key = f"left/{rank}"
        if self.store.check([key]):
            return str(self.store.get(key).decode())
        member = self.members[rank] if self.members else None
        if member is not None and member["machine"] == _machine() and not _runs(member["pid"]):
            return "it was killed"
        return None


def follows(error: BaseException) -> bool:
    """Whether an error comes from what another process did."""
    failure: BaseException | None = error
    visited: set[int] = set()
    while failure is not None and id(failure) not in visited:
        if isinstance(failure, JobError):
            return True
        visited.add(id(failure))
        failure = failure.__cause__ or failure.__context__
    return False


def prefixed(store: Any) -> Any:
    """The part of a store that this package uses in this run of the job."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(f"torch_xla/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def tell_end(store: Any, rank: int, reason: str) -> None:
    """Tells the others in a store, as `prefixed` gives it, that a process has ended, if it did not do so itself.

    The reason is "" where it had nothing more to do.
    """
    store.compare_set(f"left/{rank}", "", reason)
    store.add("news", 1)


def _machine() -> str:
    """What those who see each other's process numbers have in common."""
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


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps back what Gloo prints on standard output when it connects; what others print meanwhile passes."""
    sys.stdout.flush()
    saved = os.dup(1)
    source, sink = os.pipe()
    os.dup2(sink, 1)
    os.close(sink)

    def forward() -> None:
        with os.fdopen(source, "rb") as lines, os.fdopen(saved, "wb", 0) as output:
            for text in lines:
                if not text.startswith(b"[Gloo]"):
                    output.write(text)

    # It ends with the last writer, which may be a process that was started in the block.
    forwarding = threading.Thread(target=forward, name="torch_xla-output", daemon=True)
    forwarding.start()
    try:
        yield
    finally:
        os.dup2(saved, 1)
        forwarding.join(_OUTPUT_ENDS)


def connect(rank_info: environment.RankInfo, serves: bool) -> Any:
    """A connection to the store of a job, which is to be here if this process `serves` it.

    Raises JobError where it cannot be reached, or cannot listen there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_config.XLA_JOB_START_TIMEOUT.get())
    if rank_info.address is None:
        raise JobError(
            message(
                "job",
                f"a job of {rank_info.world} processes without MASTER_ADDR",
                expected="the host of rank 0 in it",
                do="start the processes with torch_xla.launch or torchrun, or set MASTER_ADDR and MASTER_PORT",
            )
        )
    try:
        if serves and rank_info.address in LOCAL:
            return listen(rank_info.address, rank_info.port)
        store = TCPStore(
            rank_info.address, rank_info.port, None, serves, timeout, wait_for_workers=False, multi_tenant=True
        )
        _limit_waits(rank_info.port)
        return _own(store)
    except (OSError, RuntimeError) as error:
        listens, reason = "listen" if serves else "reach rank 0", str(error).splitlines()[0]
        raise JobError(
            message(
                "job",
                f"rank {rank_info.rank} could not {listens} at {rank_info.address}:{rank_info.port} ({reason})",
                do="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there",
            )
        ) from None


def _limit_waits(port: int) -> None:
    """Has the system end a connection to the store whose host is cut off, for whose answer PyTorch waits for ever."""
    if sys.platform != "linux":
        return
    seconds = int(min(max(_config.XLA_COLLECTIVE_TIMEOUT.get(), 2.0), 3600.0))
    options = {
        socket.TCP_USER_TIMEOUT: 1000 * seconds,  # for what was sent
        socket.TCP_KEEPIDLE: max(seconds // 2, 1),  # for what is awaited
        socket.TCP_KEEPINTVL: max(seconds // 4, 1),
        socket.TCP_KEEPCNT: 2,
    }
    for number in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as duplicate:  # the options are of what both stand for
                if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.getpeername()[1] != port:
                    continue
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in options.items():
                    duplicate.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:
            continue  # it listens, or was closed meanwhile


def listen(address: str, port: int) -> Any:
    """A store at a loopback address, which only processes of this host reach; port 0 takes any free port.

    Raises OSError where the port is in use.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        port = server.getsockname()[1]
        handle = server.detach()
        return _own(
            TCPStore(address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=handle)
        )


def host_group(store: Any, rank: int, size: int, timeout: timedelta | None) -> Any:
    """PyTorch's process group for values on the host, whose processes find each other in a store.

    The timeout is how long a collective may take.
    """
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=_config.XLA_JOB_START_TIMEOUT.get())  # for the processes to connect
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [ProcessGroupGloo.create_default_device()]
    else:
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(environment.rank_info()))]
    with _silent():
        group = _own(ProcessGroupGloo(store, rank, size, options))
    if timeout is not None:
        group._set_default_timeout(timeout)
    return group


def own_address(place: environment.RankInfo) -> str:
    """The address of this host where the others of the job reach it: that from which it reaches the store.

    The host's name, which Gloo would ask for, stands for the host alone on many.
    """
    if place.world == 1 or place.address is None or place.address in LOCAL:
        return "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
