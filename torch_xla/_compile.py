"""`torch_xla.compile` and `torch_xla.step`: regions whose operations become graphs of their own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._api import barrier
from torch_xla._core.compile import options as compiler_options
from torch_xla._core.execute import region
from torch_xla._core.report import debug_level
from torch_xla._errors import message

# A function keeps its graphs over several calls of `compile`, as long as it lives.
_sessions: weakref.WeakKeyDictionary[Callable[..., Any], region.AcceptedGraphs] = weakref.WeakKeyDictionary()

_CAPTURE = (
    "write: graph = torch_xla.Graph(); with graph: loss = step(x, y); then for each batch x.copy_(inputs); "
    "y.copy_(labels); graph.replay()"
)


def _session_of(function: Callable[..., Any] | None) -> region.AcceptedGraphs:
    if function is None:
        return region.AcceptedGraphs()
    try:
        return _sessions.setdefault(function, region.AcceptedGraphs())
    except TypeError:  # not hashable, or no weak references to it
        return region.AcceptedGraphs()


class _CompileContext:
    """A region as context manager and decorator; it may be entered again, also while it is entered."""

    def __init__(
        self,
        full_graph: bool,
        name: str | None,
        max_different_graphs: int | None,
        session: region.AcceptedGraphs,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._full_graph = full_graph
        self._name = name
        self._limit = max_different_graphs
        self._session = session
        self._options = None if options is None else compiler_options.checked(options)
        self._open: list[tuple[region.Region, Any]] = []

    def __enter__(self) -> None:
        _bindings.suspend_eager(True)
        try:
            # What is pending from before belongs to another graph.
            with region.entered(region.Region(f"{self._name}_clear_pending" if self._name else None)):
                barrier(debug_level.COMPILE_ENTRY)
            running = region.Region(self._name, self._full_graph, self._limit, self._session, options=self._options)
            entered = region.entered(running)
            entered.__enter__()
        except BaseException:
            _bindings.suspend_eager(False)
            raise
        self._open.append((running, entered))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running, entered = self._open.pop()
        running.closing = True
        try:
            barrier(debug_level.COMPILE)
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"[compile] while leaving the region: {second}")
        finally:
            entered.__exit__(None, None, None)
            _bindings.suspend_eager(False)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return compile(
            function,
            full_graph=self._full_graph,
            name=self._name,
            max_different_graphs=self._limit,
            custom_compile_options=None if self._options is None else dict(self._options),
        )


class _CompiledModule:
    """A module whose calls are regions; every other attribute is the module's."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        self.__dict__.update(_module=module, _call=call, __wrapped__=module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __repr__(self) -> str:
        return f"torch_xla.compile({self._module!r})"


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    replay: bool = False,
    custom_compile_options: Mapping[str, str | int | float] | None = None,
) -> Any:
    """Runs a function or a block as a graph of its own, also in eager mode.

    On entry, work that is still pending is dispatched; inside, operations are recorded even when eager mode is on; on
    exit, the recorded graph is compiled once and dispatched. Three ways to use it::

        @torch_xla.compile
        def step(x): ...

        step = torch_xla.compile(step, full_graph=True)

        with torch_xla.compile():
            ...

    Args:
        f: Function or module to wrap. Without it the result is a context manager, which is also a decorator.
        full_graph: Whether the region must become one graph: reading a value, or a barrier, inside it then raises.
        name: Name of the graphs in messages and dumps; the function's name by default.
        max_different_graphs: How many different graphs the function may have over its life; one more raises and shows
            the first operation that differs.
        replay: No longer there: `torch_xla.Graph` captures a step, and replays it without Python.
        custom_compile_options: Options of the device's compiler for this region's graphs, in place of those of
            `set_custom_compile_options`.

    Returns:
        The wrapped function or module, or the context manager.

    Raises:
        TypeError: ``f`` cannot be called, or the options are not text, numbers and booleans by name.
        ValueError: ``max_different_graphs`` is below 1, or ``replay`` is set.
        GraphLimitError: (a `RuntimeError`, inside the region) ``full_graph`` or ``max_different_graphs`` is violated.
    """
    if f is not None and not callable(f):
        raise TypeError(message("compile", f"got {type(f).__name__}", expected="a function, a module or nothing"))
    if replay:
        raise ValueError(message("compile", "replay=True", expected="a step that is captured once", do=_CAPTURE))
    if max_different_graphs is not None and max_different_graphs < 1:
        raise ValueError(
            message("compile", f"max_different_graphs={max_different_graphs}", expected="1 or more, or None")
        )
    if f is None:
        session = region.AcceptedGraphs()
        return _CompileContext(bool(full_graph), name, max_different_graphs, session, custom_compile_options)
    label = name or getattr(f, "__name__", None) or type(f).__name__
    session = _session_of(f) if max_different_graphs is not None else region.AcceptedGraphs()
    options = None if custom_compile_options is None else dict(compiler_options.checked(custom_compile_options))

    def call(*args: Any, **kwargs: Any) -> Any:
        with _CompileContext(bool(full_graph), label, max_different_graphs, session, options):
            return f(*args, **kwargs)

    if isinstance(f, torch.nn.Module):
        return _CompiledModule(f, call)
    return functools.wraps(f)(call)


def set_custom_compile_options(compile_options: Mapping[str, str | int | float]) -> None:
    """Sets options of the device's compiler for what is compiled from now on, as a plugin documents them.

    A program is looked up with the options that it was compiled with. An option that the compiler does not know raises
    at the barrier that compiles, and what was recorded stays pending.

    Args:
        compile_options: Text, numbers and booleans by name, in place of those set before; ``{}`` resets them.

    Raises:
        TypeError: They are something else.
    """
    compiler_options.set_custom(compile_options)


def step() -> Any:
    """A context for one training step: what is pending before it and what it records become separate graphs.

    Example::

        for inputs, labels in loader:
            with torch_xla.step():
                loss = loss_fn(model(inputs), labels)
                loss.backward()
                optimizer.step()
    """
    return compile()
