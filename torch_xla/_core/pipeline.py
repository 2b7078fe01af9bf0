"""The one function that runs all stages: cut → look up → (lower → compile) → run → attach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch_xla import _bindings, _capture, _config, _files, _timeline
from torch_xla._core import (
    analysis,
    backend,
    cache,
    compiler,
    dispatch,
    executor,
    graph,
    graph_text,
    host,
    loop_report,
    lowering,
    memory,
    region,
    retrace,
    verify,
)
from torch_xla._errors import GraphLimitError, OutOfMemoryError
from torch_xla.ops.registry import Meta, StaticNumbers

# What looks at each program before it runs.
_WATCHING = _config.Watch(*memory.ASKED_BY, *analysis.ASKED_BY)


def run(cut_graph: Callable[[], _bindings.Graph], cause: str, reading: bool) -> None:
    """Cuts a graph and runs it.

    Args:
        cut_graph: Cuts it.
        cause: What asks for it, as the analyses print it.
        reading: Its values go to the host next, so a very small graph is computed there.

    Raises:
        GraphLimitError: It may not run here; it stays pending, as with the next two.
        OutOfMemoryError: It would not fit.
        StaticNumbers: An operator must be recorded with its numbers as constants.
        RuntimeError: Lowering, compiling or running failed; tensors keep the values of the last barrier.
    """
    watched = _watched()
    with _timeline.span("cut") if watched else _timeline.NOTHING:
        cut = cut_graph()
        if cut.has_fills:
            provide_fills(cut)
    outputs = cut.num_outputs
    if not outputs:
        return
    name = None
    try:
        if watched:
            name = region.before_run(cut.key, _bindings.user_frame, lambda: graph.describe(cut))
        if reading and cut.fits_host and _config.XLA_HOST_COMPUTE.get() and host.run(cut):
            return
        # The steady state of a loop: nothing else of it is Python code from here to the results.
        if watched or not cache.run(cut):
            _run_by_stages(cut, cause, name)
        if reading:
            loop_report.value_read(outputs, cut.device)
    except (GraphLimitError, OutOfMemoryError, StaticNumbers):  # before anything ran: the graph stays pending
        raise
    except Exception as error:
        if memory.ran_out(error):
            failure: RuntimeError = memory.explain(error, cut, name)
            text = str(failure)
        else:
            text = f"[sync] graph {name or cut.key} failed: {error}"
            failure = RuntimeError(text)
        cut.abandon(f"{text}\n  This tensor had no value before that graph; make it again.")
        raise failure from error


def _watched() -> bool:
    """Whether somebody looks at the stages of each run, or has a say in it."""
    return (
        bool(_timeline.recorder or _capture.on or region.stack or not region.allowed or dispatch.disturbed())
        or _WATCHING.any_set()
    )


def _run_by_stages(cut: _bindings.Graph, cause: str, name: str | None) -> None:
    with _timeline.span("look up"):
        executable = cache.find(cut)
    if executable is None:
        executable = _compile(cut, cause, name)
    memory.before_run(executable, cut, name)
    analysis.before_run(cut, cause, name)
    executor.run(executable, cut)


def _compile(cut: _bindings.Graph, cause: str, name: str | None) -> compiler.Executable:
    described = graph.describe(cut)
    if _config.XLA_VERIFY_GRAPHS.get():
        verify.verify(described)
    _dump(described)
    lowered = compiler.lower(described, name or "graph")
    retrace.note(described, _bindings.user_frame(), name)
    analysis.before_compile(described, cause, name)
    executable = compiler.compile_lowered(cut, lowered, name or "graph")
    analysis.after_compile(executable)
    cache.add(cut, executable)
    return executable


def provide_fills(cut: _bindings.Graph) -> None:
    """Gives buffers to those leaves of a graph that are still to be filled with a number."""
    fills = cut.describe_fills()
    cut.provide_fills([backend.fill(shape, dtype, number, cut.device) for (shape, dtype), number in fills])


def _dump(described: graph.Graph) -> None:
    path = _config.XLA_SAVE_TENSORS_FILE.get()
    if path is not None:
        text = render(described, _config.XLA_SAVE_TENSORS_FMT.get())
        _files.append("graph", "XLA_SAVE_TENSORS_FILE", path, text)


def render(described: graph.Graph, form: str, computed: Sequence[Meta] = ()) -> Any:
    """A graph to look at.

    Args:
        described: The graph.
        form: ``"text"``, ``"dot"``, ``"hlo"``, ``"hlo_proto"``, ``"stablehlo"`` or ``"stablehlo_bytecode"``.
        computed: Further tensors to show in the text, whose values are on the device.

    Returns:
        The text, or bytes for the protobuf message and the bytecode.
    """
    if form == "text":
        return graph_text.text(described, computed)
    if form == "dot":
        return graph_text.dot(described)
    stage = lowering.lower(described).stage
    if form == "hlo":
        return lowering.hlo_text(stage)
    if form == "hlo_proto":
        module: Any = stage.compiler_ir("hlo")
        return module.as_serialized_hlo_module_proto()
    if form == "stablehlo":
        return stage.as_text()
    if form == "stablehlo_bytecode":
        return lowering.bytecode(stage)
    raise ValueError(f"[graph] got form {form!r}, expected text, dot, hlo, hlo_proto, stablehlo or stablehlo_bytecode")
