"""Profiles of the running program for TensorBoard and Perfetto, through JAX's profiler; imported as ``xp``.

A profile shows the device's operators beside rows of the host: recording, lowering, compiling, copies, waits, and the
blocks that the program names with `Trace` and `StepTrace`. ``pip install torch_xla[profile]`` brings the client that
`trace` needs, and the plugin that shows profiles.

Example::

    xp.start_trace("/tmp/profile")
    for step, batch in enumerate(batches):
        with xp.StepTrace("train", step_num=step):
            train(batch)
    xp.stop_trace()
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch_xla
from torch_xla import _capture, runtime
from torch_xla._api import barrier
from torch_xla._core.device import background, client
from torch_xla._core.report import debug_level
from torch_xla._errors import message
from torch_xla.debug import _profiler_server
from torch_xla.debug._profiler_server import ProfilerServer as ProfilerServer

P = ParamSpec("P")
R = TypeVar("R")

_tracing = threading.Lock()  # held while a trace of this process runs


def start_server(port: int, only_on_master: bool = True) -> ProfilerServer | None:
    """Starts a server that `trace` and TensorBoard can ask for profiles. It runs as long as the object returned.

    It answers this machine alone. ``XLA_PROFILER_ANY_HOST=1`` lets others connect; who can connect can have files
    written where this process may write.

    Args:
        port: The port. A server that runs on it already, in this process, is returned.
        only_on_master: Whether only the first process starts one.

    Raises:
        RuntimeError: the port is in use, or this process has a server on another one.
    """
    if only_on_master and runtime.local_ordinal() != 0:
        return None
    return _profiler_server.start(port)


def start_trace(log_dir: os.PathLike[str] | str) -> None:
    """Starts to collect a profile of this process.

    Args:
        log_dir: Folder for the profile.

    Raises:
        RuntimeError: the folder cannot be written, or a profile is being collected already.
    """
    import jax

    _check_writable(os.fspath(log_dir))
    if not _tracing.acquire(blocking=False):
        raise RuntimeError(
            message("profiler", "a trace was started while another runs", do="Only one profile may be run at a time.")
        )
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a row for each Python call slows the host down several times
    try:
        client.jax_device(0)  # a client that JAX starts by itself may have fewer devices
        jax.profiler.start_trace(os.fspath(log_dir), profiler_options=options)
    except BaseException as error:
        _tracing.release()
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                message("profiler", f"JAX could not start a trace: {error}", do="end other profilers of this process")
            ) from error
        raise
    _capture.enable(jax.profiler.TraceAnnotation)
    _capture.resume()


def stop_trace() -> None:
    """Writes the profile that `start_trace` began.

    Raises:
        RuntimeError: none was started, or its folder cannot be written any more; the profile is lost then.
    """
    import jax

    if not _tracing.locked():
        raise RuntimeError(message("profiler", "No profile started", do="call start_trace first"))
    try:
        torch_xla.sync(wait=True)
    finally:
        _capture.disable()
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            from torch_xla import _jax_internals

            _jax_internals.forget_trace()
            raise RuntimeError(
                message("profiler", f"the trace was not written: {error}", do="name another log_dir, and trace again")
            ) from error
        finally:
            _tracing.release()


def _check_writable(log_dir: str) -> None:
    if "://" in log_dir:
        return
    try:
        os.makedirs(log_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise RuntimeError(
            message("profiler", f"log directory {log_dir!r} cannot be written ({error})", do="name another one")
        ) from error


def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """Collects a profile from servers, in this process or others, and returns when it is written.

    Args:
        service_addr: Addresses of the servers, ``"host:port"``, separated by commas.
        logdir: Folder for the profile.
        duration_ms: How long to collect, in milliseconds.
        num_tracing_attempts: How often to try when nothing was collected.
        host_tracer_level: Rows of the host: 1 for few, 2, 3 for all.
        device_tracer_level: Rows of the device: 1, or 0 for none.
        delay_ms: When to begin, from now, in milliseconds.
        timeout_s: How long to wait for servers that do not answer yet.
        interval_s: How long to wait between two attempts to reach them.

    Raises:
        ImportError: the client is not installed.
        RuntimeError: no server answers, nothing was collected, or the folder cannot be written.
    """
    client = _client()
    _check_writable(logdir)
    for address in service_addr.split(","):
        _await_server(address.strip(), timeout_s, interval_s)
    options = {
        "host_tracer_level": host_tracer_level,
        "device_tracer_level": device_tracer_level,
        "python_tracer_level": 0,
        "delay_ms": delay_ms,
    }
    try:
        client.trace(service_addr, logdir, "", True, duration_ms, num_tracing_attempts, options)
    except RuntimeError as error:
        raise RuntimeError(
            message(
                "profiler",
                f"no trace from {service_addr} ({str(error).splitlines()[0]})",
                do="check that no other trace runs there",
            )
        ) from error


def _client() -> Any:
    try:
        return importlib.import_module("xprof.convert._pywrap_profiler_plugin")
    except ImportError as error:
        raise ImportError(
            message(
                "profiler",
                f"the client that asks servers for profiles cannot be imported ({error})",
                do="pip install 'torch_xla[profile]', or call start_trace and stop_trace in the program",
            )
        ) from error


def _await_server(address: str, timeout_s: float, interval_s: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(message("profiler", f"address {address!r}", expected="host:port"))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(interval_s, 1)).close()
            return
        except OSError as error:
            if time.monotonic() + interval_s > deadline:
                raise RuntimeError(
                    message(
                        "profiler",
                        f"no answer from {address} within {timeout_s} s ({error})",
                        do="call xp.start_server(port) in the program that is to be profiled",
                    )
                ) from error
        time.sleep(interval_s)


def trace_detached(*args: Any, **kwargs: Any) -> threading.Thread:
    """`trace` in a thread of its own, which is returned; what goes wrong there is told on stderr."""

    def run() -> None:
        try:
            trace(*args, **kwargs)
        except Exception as error:
            print(error, file=sys.stderr)

    return background.start("profiler-trace", run)


class Trace:
    """A block or function with a name in the trace. It belongs to one step: no `torch_xla.sync` within it.

    Args:
        name: The name.
        **kwargs: Values to show with it.
    """

    _within_step = True

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.name = name
        self._values = kwargs
        self._open = threading.local()

    def _annotation(self) -> Any:
        import jax

        return jax.profiler.TraceAnnotation(self.name, **self._values)

    def __enter__(self) -> Trace:
        _capture.pause()  # rows are nested in a profile: what is recorded in this block has a row of its own
        self._open.annotation = self._annotation()
        self._open.annotation.__enter__()
        if self._within_step:
            _capture.blocks.names.append(self.name)
        _capture.resume()
        return self

    def __exit__(self, *error: Any) -> None:
        _capture.pause()
        if self._within_step:
            _capture.blocks.names.pop()
        self._open.annotation.__exit__(*error)
        _capture.resume()


class StepTrace(Trace):
    """A step of a training loop in the trace, with a barrier at its end.

    Args:
        name: The name.
        **kwargs: ``step_num`` and other values to show with it.
    """

    _within_step = False

    def _annotation(self) -> Any:
        import jax

        return jax.profiler.StepTraceAnnotation(self.name, **self._values)

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                barrier(debug_level.STEP_TRACE)
        finally:
            super().__exit__(*error)


def trace_me(scope: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that its calls have a name in the trace.

    Args:
        scope: The name.
    """

    def decorator(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with Trace(scope):
                return fn(*args, **kwargs)

        return wrapper

    return decorator
