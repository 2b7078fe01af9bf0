"""`torch_xla.Graph`: what is recorded between two lines, as one program that runs at each `replay`."""

from __future__ import annotations

import itertools
import time
import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torch_xla import _bindings, _events, _metrics
from torch_xla._core.device import memory_stats
from torch_xla._core.execute import barrier, region
from torch_xla._core.graph import graph
from torch_xla._core.job import pending_collectives
from torch_xla._core.report import debug_level, loop_report
from torch_xla._errors import message

_MODES = ("default", "global", "thread_local", "relaxed")
_pools = itertools.count(1)


class Graph:
    """A graph that is captured once and replayed, with the interface of `torch.accelerator.Graph`.

    What this thread records on the current device between the beginning and the end becomes one program. It is
    compiled and does not run, and tensors keep the values that they had. A replay runs it on the memory that it was
    captured with, which it keeps alive: it reads what is there now and writes there, and tensors that were made inside
    have new values then. Numbers are constants; random numbers go on from replay to replay.

    Args:
        keep_graph: Whether `instantiate`, or the first replay, compiles the graph in place of the end of the capture.
        pool: What `pool` gives. XLA plans the memory of each program by itself.
        capture_error_mode: One of PyTorch's names. What cannot be captured raises in each.

    Example::

        static_x, static_y = inputs.clone(), labels.clone()
        graph = torch_xla.Graph()
        with graph:
            loss = step(static_x, static_y)
        for x, y in loader:
            static_x.copy_(x)
            static_y.copy_(y)
            graph.replay()
    """

    def __init__(
        self, keep_graph: bool = False, *, pool: tuple[int, int] | None = None, capture_error_mode: str = "default"
    ) -> None:
        self._scope: ExitStack | None = None  # while it captures
        if capture_error_mode not in _MODES:
            raise ValueError(
                message("graph", f"got capture_error_mode={capture_error_mode!r}", expected=f"one of {_MODES}")
            )
        self.graph_pool = pool
        self.capture_error_mode = capture_error_mode
        self._keeps = keep_graph
        self._debug = False
        self.reset()

    def reset(self) -> None:
        """Deletes what was captured; the instance may capture again."""
        if self._scope is not None:
            raise RuntimeError(message("graph", "got reset() within the capture", do="end the capture first"))
        self._device = -1
        self._pool = self.graph_pool or (0, next(_pools))
        self._captured: Any = None
        self._recorded: Any = None  # until it is compiled
        self._executable: Any = None
        self._text: str | None = None

    def capture_begin(self) -> None:
        """Begins: what this thread records on the current device from here on belongs to the graph.

        Raises:
            RuntimeError: This graph has a capture, or this thread is within one.
        """
        if self._captured is not None or self._scope is not None:
            raise RuntimeError(message("graph", "got a second capture", do="make another graph, or reset() this one"))
        region.refuse_captured("a capture")
        device = _bindings.current_device()
        with barrier.exclusive(), ExitStack() as scope:
            barrier.sync(device, wait=True, cause=debug_level.CAPTURE)
            capture = _bindings.Capture(device)
            scope.callback(capture.end)
            capture.begin()
            scope.enter_context(_HostState())
            self._scope = scope.pop_all()
        self._device = device

    def capture_end(self) -> None:
        """Ends, and compiles the graph. Nothing of it ran.

        Raises:
            RuntimeError: It cannot be compiled.
        """
        scope, self._scope = self._scope, None
        if scope is None:
            raise RuntimeError(message("graph", "got capture_end()", expected="capture_begin() before it"))
        with barrier.exclusive():
            with scope:
                marks = pending_collectives.take(self._device)
                recorded = _bindings.Cut.of_capture(self._device).graph()
                del marks
                if self._debug:
                    from torch_xla._core.report import render

                    self._text = render.render(graph.describe(recorded), "dot")
                captured = _bindings.CapturedGraph(recorded)
            # The capture is over: what other threads record while this compiles is no part of it.
            empty = not recorded.num_outputs
            if not (self._keeps or empty):
                self._compile(recorded, captured)
            self._recorded, self._captured = recorded if self._executable is None else None, captured
        if empty:
            warnings.warn(
                "[graph] got a capture in which nothing was recorded on the device, so that a replay does nothing; "
                "move the step and its tensors to xla",
                stacklevel=2,
            )

    def instantiate(self) -> None:
        """Compiles the graph, if that has not been done."""
        self._check_captured("instantiate()")
        recorded = self._recorded
        if self._executable is None and recorded.num_outputs:
            with barrier.exclusive():
                self._compile(recorded, self._captured)
            self._recorded = None

    def replay(self) -> None:
        """Runs the program, without waiting for it, on what the memory holds that was captured.

        Raises:
            RuntimeError: There is no capture; this thread is within one; or memory that was captured was resized,
                moved, or has no value.
        """
        self._check_captured("replay()")
        region.refuse_captured("a replay", self._device)
        if self._executable is None:
            self.instantiate()
        device, captured = self._device, self._captured
        with _events.span("barrier", lambda: (debug_level.REPLAY, _bindings.user_frame())), barrier.exclusive():
            token = None
            while token is None:
                if _bindings.has_pending(device):
                    barrier.sync(device, cause=debug_level.REPLAY)
                barrier.stages().finish(device)  # its graph may run op by op
                if self._executable is None:  # nothing was recorded
                    return
                start = time.perf_counter()
                try:
                    token = captured.replay()
                except _bindings.StaleGraph:  # a signal handler has written what it reads
                    continue
                except RuntimeError as error:
                    if memory_stats.ran_out(error):
                        raise memory_stats.explain_late(error, device) from error
                    raise
            _events.launched(device, self._key, start, self._executable, token)
        _metrics.count("Replay")
        loop_report.step_done()

    def pool(self) -> tuple[int, int]:
        """A token for the memory of the graph, which other graphs may be given."""
        self._check_captured("pool()")
        return self._pool

    def enable_debug_mode(self) -> None:
        """Makes later captures keep what `debug_dump` writes."""
        self._debug = True

    def debug_dump(self, path: str) -> None:
        """Writes the graph as Graphviz's text, where `enable_debug_mode` was called before the capture."""
        if self._text is None:
            warnings.warn("[graph] debug_dump() has nothing to write: enable_debug_mode() comes first", stacklevel=2)
            return
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._text)

    def __enter__(self) -> Graph:
        self.capture_begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.capture_end()
        else:
            self._drop()

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()

    def _compile(self, recorded: Any, captured: Any) -> None:
        executable = barrier.stages().program_of(recorded)
        captured.set_program(recorded, executable.program)
        self._key, self._executable = recorded.key, executable

    def _check_captured(self, what: str) -> None:
        if self._captured is None:
            raise RuntimeError(message("graph", f"got {what}", expected="a capture before it", do="capture first"))


def is_current_stream_capturing() -> bool:
    """Whether what this thread records belongs to a graph that is captured."""
    return _bindings.captures_here()


class _HostState:
    """A scope in which a step of an optimizer that changes its state on the host raises, and leaves that as it was."""

    def __enter__(self) -> None:
        self._before: dict[int, dict[Any, dict[str, Any]]] = {}
        self._hooks = (
            register_optimizer_step_pre_hook(self._note),
            register_optimizer_step_post_hook(self._compare),
        )

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        if _bindings.captures_here():
            self._before[id(optimizer)] = {p: _on_host(state) for p, state in optimizer.state.items()}

    def _compare(self, optimizer: Optimizer, *_: Any) -> None:
        before = self._before.pop(id(optimizer), None)
        if before is None:
            return
        changed = None
        for p, state in optimizer.state.items():
            snapshot = before.get(p, {})
            for name, value in _on_host(state).items():
                if name not in snapshot or not bool(snapshot[name] == value):
                    changed = name
                    if name in snapshot:
                        state[name] = snapshot[name]
                    else:
                        del state[name]
        if changed is not None:
            got = f"got a step of {type(optimizer).__name__}, which changes '{changed}' on the host,"
            expected = "state on the device, which replays change too"
            do = "give it capturable=True where it has that, and take a step before the capture"
            raise RuntimeError(message("graph", got, expected=expected, do=do))


def _on_host(state: Any) -> dict[str, Any]:
    """The entries of a parameter's optimizer state that are numbers, or host tensors of one."""
    scalars: dict[str, Any] = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
            scalars[name] = value.clone()
        elif isinstance(value, (int, float)):
            scalars[name] = value
    return scalars
