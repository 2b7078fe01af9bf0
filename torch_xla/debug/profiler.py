"""Traces of the running program for TensorBoard and Perfetto, through JAX's profiler; imported as ``xp``."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch_xla
from torch_xla import runtime
from torch_xla._api import barrier
from torch_xla._core import analysis
from torch_xla._errors import message

P = ParamSpec("P")
R = TypeVar("R")


def start_server(port: int, only_on_master: bool = True) -> object | None:
    """Starts a server that profilers can connect to. It runs as long as the object that is returned.

    Args:
        port: The port.
        only_on_master: Whether only the first process starts one.
    """
    if only_on_master and runtime.local_ordinal() != 0:
        return None
    import jax

    return jax.profiler.start_server(port)


def start_trace(log_dir: os.PathLike[str] | str) -> None:
    """Starts to collect a trace.

    Args:
        log_dir: Folder for the trace.
    """
    import jax

    jax.profiler.start_trace(log_dir)


def stop_trace() -> None:
    """Writes the trace that `start_trace` began."""
    import jax

    torch_xla.sync(wait=True)
    jax.profiler.stop_trace()


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
    """Would collect a trace from a server in another process.

    Raises:
        NotImplementedError: always: it needs a profiler client, which JAX does not have.
    """
    raise NotImplementedError(
        message(
            "profiler",
            f"a trace from the server at {service_addr} was asked for",
            do="call start_trace and stop_trace in the program, or connect TensorBoard to the server",
        )
    )


def trace_detached(*args: Any, **kwargs: Any) -> None:
    """`trace` in a thread of its own.

    Raises:
        NotImplementedError: always, as `trace`.
    """
    trace(*args, **kwargs)


class Trace:
    """A block or function with a name in the trace.

    Args:
        name: The name.
        **kwargs: Values to show with it.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.name = name
        self._values = kwargs
        self._open = threading.local()

    def _annotation(self) -> Any:
        import jax

        return jax.profiler.TraceAnnotation(self.name, **self._values)

    def __enter__(self) -> Trace:
        self._open.annotation = self._annotation()
        self._open.annotation.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.annotation.__exit__(*error)


class StepTrace(Trace):
    """A step of a training loop in the trace, with a barrier at its end.

    Args:
        name: The name.
        **kwargs: ``step_num`` and other values to show with it.
    """

    def _annotation(self) -> Any:
        import jax

        return jax.profiler.StepTraceAnnotation(self.name, **self._values)

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                barrier(analysis.STEP_TRACE)
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
