"""JAX's profiler server, which answers this machine alone unless told otherwise."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from torch_xla import _capture, _config
from torch_xla._core.device import client
from torch_xla._errors import message

_LISTENING = "0A"  # in the kernel's table of sockets
_OPEN = "XLA_PROFILER_ANY_HOST=1 lets other machines connect too"

_lock = threading.Lock()
_running: weakref.ref[ProfilerServer] | None = None


class ProfilerServer:
    """A running server; it stops when the object is gone.

    Attributes:
        port: The port it listens on.
    """

    def __init__(self, port: int) -> None:
        import jax

        self.port = port
        client.jax_device(0)  # a client that JAX starts by itself may have fewer devices
        jax.profiler.start_server(port)
        self._stop = weakref.finalize(self, _stop)
        _capture.enable(jax.profiler.TraceAnnotation)
        try:
            _check(port)
        except BaseException:
            self._stop()
            raise

    def stop(self) -> None:
        """Stops it."""
        self._stop()


def _stop() -> None:
    import jax

    _capture.disable()
    jax.profiler.stop_server()


def start(port: int) -> ProfilerServer:
    """The server on a port, which is started unless this process has it already."""
    global _running
    with _lock:
        existing = _running() if _running is not None else None
        if existing is not None and existing._stop.alive:
            if existing.port == port:
                return existing
            raise RuntimeError(
                message(
                    "profiler", f"port {port}, but this process has a server on port {existing.port}", do="use that"
                )
            )
        _check_free(port)
        server = ProfilerServer(port)
        _running = weakref.ref(server)
        return server


def _check_free(port: int) -> None:
    # The server says nothing if it cannot have the port, and shares it with others of its kind.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        if not 0 < port < 1 << 16:
            raise OSError("ports are from 1 to 65535")
        with socket.create_server(("", port), family=family, dualstack_ipv6=dual):
            pass
    except OSError as error:
        raise RuntimeError(
            message("profiler", f"port {port}, which a server cannot have ({error})", do="choose another")
        ) from error


def _check(port: int) -> None:
    """Shuts other machines out: JAX's server listens on all addresses and has no option for that."""
    if _config.XLA_PROFILER_ANY_HOST.get():
        return
    if not hasattr(socket, "SO_BINDTODEVICE"):
        raise RuntimeError(
            message("profiler", "a server for this machine alone, which this system cannot have", do=_OPEN)
        )
    has_listener = False
    for descriptor in _listeners(port):
        has_listener = True
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
            except OSError as error:
                raise RuntimeError(
                    message("profiler", f"no server for this machine alone ({error})", do=_OPEN)
                ) from error
    if not has_listener:
        raise RuntimeError(message("profiler", f"no server came up on port {port}", do="choose another port"))


def _listeners(port: int) -> Iterator[int]:
    """This process's descriptors of sockets that listen on a port."""
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == _LISTENING}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}") in sockets:
                yield int(entry)
        except OSError:  # closed meanwhile
            continue
