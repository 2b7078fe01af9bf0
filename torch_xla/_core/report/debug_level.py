"""Prints what ``PT_XLA_DEBUG_LEVEL`` asks for, as scripts parse it: compiles, executions, metrics at exit."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

from torch_xla import _bindings, _config, _files, _metrics
from torch_xla._core.device import memory_stats
from torch_xla._core.graph.graph import Graph, describe
from torch_xla._core.job import session

if TYPE_CHECKING:
    from torch_xla._core.compile.compiler import Executable

ASKED_BY = (_config.PT_XLA_DEBUG_LEVEL, _config.PT_XLA_DEBUG)  # without them `level` is 0

# What asks for a graph.
SYNC = "user torch_xla.sync"
LOADER = "torch_xla.sync in parallel loader at step end"
STEP_TRACE = "torch_xla.sync when exiting a profiler StepTrace region"
COMPILE = "torch_xla.compile"
COMPILE_ENTRY = "torch_xla.compile clear the pending graph prior calling the target function"
DYNAMO_INPUTS = "torch_xla.sync when dynamo processing input graphs"
DYNAMO = "dynamo is executing a compiled program"
CAPTURE = "torch_xla.Graph captures"
REPLAY = "torch_xla.Graph replays"
AUTO = "a loop without torch_xla.sync, of which a segment is complete"
READ = "most likely user code trying to access tensor value before torch_xla.sync"

# What it is called where the graph is compiled, if that has another name.
_COMPILING = {DYNAMO: "dynamo is compiling a FX graph to HLO"}

_CORE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BARRIER = "barrier"  # the function under `torch_xla.sync`, which the frames start from
_WIDTH = 80

# What is too often, per step, and after how many steps; what takes too long, in seconds.
_OFTEN = 0.5
_FREQUENT = (
    ("CompileTime", 10, "torch_xla.debug.retrace.records() says why"),
    ("TransferFromDeviceTime", 0, "each read waits for the device; read less often, or in a step closure"),
)
_SLOW = (
    ("CompileTime", 300.0, "torch_xla.runtime.initialize_cache(path) keeps it for the next run"),
    ("ExecuteTime", 30.0, "a profile shows what the device does; see torch_xla.debug.profiler"),
)


def level() -> int:
    """0 for nothing, 1 for compiles, 2 for executions as well."""
    if _bindings.is_eager():
        return 0
    if _config.PT_XLA_DEBUG_LEVEL.is_set() and _config.PT_XLA_DEBUG_LEVEL.get() >= 0:
        return _config.PT_XLA_DEBUG_LEVEL.get()
    return 2 if _config.PT_XLA_DEBUG.get() else 0


def before_compile(graph: Graph, cause: str, name: str | None) -> None:
    """Tells what is compiled, and at whose request."""
    if level() > 0:
        _graph("Compilation", graph, _COMPILING.get(cause, cause), name)


def before_run(graph: _bindings.Graph, cause: str, name: str | None) -> None:
    """Tells what runs, and at whose request."""
    if level() > 1:
        _graph("Execution", describe(graph), cause, name)


def after_compile(executable: Executable) -> None:
    """Tells how much memory a compiled graph takes."""
    if level() <= 0:
        return
    stats = memory_stats.compiled_stats(executable.loaded)
    if stats is None:
        return
    sizes = {
        "Graph input size": stats.argument_size_in_bytes,
        "Graph output size": stats.output_size_in_bytes,
        "Aliased Input size": stats.alias_size_in_bytes,
        "Intermediate tensor size": stats.temp_size_in_bytes,
        "Compiled program size": stats.generated_code_size_in_bytes,
    }
    _write("Post Compilation", [f"{name}: {size / 2**30:f} GB" for name, size in sizes.items()])


def at_exit() -> None:
    """Tells which metrics of the whole run stand out, if there is something to tell."""
    lines = findings() if level() > 0 else []
    if lines:
        _emit("".join(f"pt-xla-profiler: {line}\n" for line in lines))


def findings() -> list[str]:
    """Advice on speed from the metrics of this process, one line each."""
    steps = _metrics.counter("MarkStep") or 0
    lines = []
    for name, warm_up, remedy in _FREQUENT:
        metric = _metrics.metric(name)
        if metric is not None and steps > warm_up and metric.count > _OFTEN * steps:
            lines.append(f"{name} too frequent: {metric.count} counts during {steps} steps; {remedy}")
    for name, limit, remedy in _SLOW:
        metric = _metrics.metric(name)
        longest = max((value for _, value in metric.samples), default=0.0) if metric is not None else 0.0
        if longest > limit:
            lines.append(f"{name} too slow: longest instance took {longest:.0f} s; {remedy}")
    on_host = [name for name in _metrics.host_ops() if name != "aten::_local_scalar_dense"]
    if on_host:
        lines.append(f"Op(s) not lowered: {', '.join(on_host)}; they ran on the host, at the lines told when they did")
    return lines


def _graph(kind: str, graph: Graph, cause: str, name: str | None) -> None:
    numbers = {number and type(number.value) for node in graph.nodes for number in node.number_inputs()}
    lines = [f"{kind} Cause", f"  {cause}", "Graph Info: "]
    if name:
        lines.append(f"  Graph Name: {name}")
    lines += [
        f"  Graph Hash: {graph.key}",
        f"  Number of Graph Inputs: {len(graph.leaves) + len(numbers)}",
        f"  Number of Graph Outputs: {len(graph.outputs)}",
        "Python Frame Triggered Execution: ",
        *_frames(),
    ]
    _write(kind, lines)


def _frames() -> list[str]:
    """The Python stack from the call that asked for the graph, innermost first."""
    stack = traceback.extract_stack()[::-1]
    outside = (i for i, f in enumerate(stack) if not f.filename.startswith(_CORE) and f.name != _BARRIER)
    start = next(outside, 0)
    limit = _config.PT_XLA_DEBUG_MAX_FRAME.get()
    lines = [f"  {frame.name} ({frame.filename}:{frame.lineno})" for frame in stack[start:]]
    return lines if len(lines) <= limit else [*lines[:limit], "  .........."]


def _write(kind: str, lines: list[str]) -> None:
    prefix = f"{kind} Analysis: "
    rows = ["", prefix + "=" * _WIDTH, *(prefix + line for line in lines), prefix + "-" * _WIDTH, prefix + "=" * _WIDTH]
    _emit("\n".join(rows) + "\n")


def _emit(text: str) -> None:
    path = _config.PT_XLA_DEBUG_FILE.get()
    if path is None or not _files.append("debug", "PT_XLA_DEBUG_FILE", session.own_file(path), text):
        sys.stderr.write(text)
