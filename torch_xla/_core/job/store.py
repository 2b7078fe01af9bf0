"""The store at which the processes of a job meet, and PyTorch's process groups for values on the host."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch_xla import _config, _torch_internals
from torch_xla._core.device import described, environment
from torch_xla._errors import JobError, message

T = TypeVar("T")

_OUTPUT_ENDS = 1.0  # seconds
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


def prefix(name: str, store: Any) -> Any:
    """The part of a store whose keys begin so."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return _own(PrefixStore(name, store))


def read(store: Any, key: str) -> str | None:
    """The value under a key of a store; None if there is none."""
    return str(store.get(key).decode()) if store.check([key]) else None


def tell_end(store: Any, rank: int, reason: str) -> None:
    """Tells the others in a store, that all of the job use, that a process has ended, if that was not told already.

    The reason is "" where it had nothing more to do.
    """
    store.compare_set(f"left/{rank}", "", reason)
    store.add("news", 1)


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
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if described.topology() is not None:  # nobody else is there
        return HashStore()
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
            with suppress(OSError):  # PyTorch's own store may listen there, for init_process_group: then it is shared
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
    """Makes the system end a connection to a store whose host is cut off: PyTorch would wait for ever."""
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

    if described.topology() is not None:
        return _torch_internals.FakeProcessGroup._create_internal(rank, size)
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
