"""What ``PT_XLA_DEBUG_LEVEL`` prints about compiles and executions, in the layout that scripts parse."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

from torch_xla import _bindings, _config
from torch_xla._core.graph import Graph

if TYPE_CHECKING:
    from torch_xla._core.compiler import Executable

# What asks for a graph.
SYNC = "user torch_xla.sync"
LOADER = "torch_xla.sync in parallel loader at step end"
STEP_TRACE = "torch_xla.sync when exiting a profiler StepTrace region"
COMPILE = "torch_xla.compile"
COMPILE_ENTRY = "torch_xla.compile clear the pending graph prior calling the target function"
READ = "most likely user code trying to access tensor value before torch_xla.sync"

_CORE = os.path.dirname(__file__) + os.sep
_WIDTH = 80


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
        _graph("Compilation", graph, cause, name)


def before_run(cut: _bindings.Graph, cause: str, name: str | None) -> None:
    """Tells what runs, and at whose request."""
    if level() > 1:
        from torch_xla._core import graph

        _graph("Execution", graph.describe(cut), cause, name)


def after_compile(executable: Executable) -> None:
    """Tells how much memory a compiled graph takes."""
    if level() <= 0:
        return
    stats = executable.loaded.get_compiled_memory_stats()
    sizes = {
        "Graph input size": stats.argument_size_in_bytes,
        "Graph output size": stats.output_size_in_bytes,
        "Aliased Input size": stats.alias_size_in_bytes,
        "Intermediate tensor size": stats.temp_size_in_bytes,
        "Compiled program size": stats.generated_code_size_in_bytes,
    }
    _write("Post Compilation", [f"{name}: {size / 2**30:f} GB" for name, size in sizes.items()])


def _graph(kind: str, graph: Graph, cause: str, name: str | None) -> None:
    numbers = {type(number.value) for node in graph.nodes for number in node.numbers()}
    if any(node.seeded for node in graph.nodes):
        numbers.add(int)
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
    start = next((i for i, frame in enumerate(stack) if not frame.filename.startswith(_CORE)), 0)
    limit = _config.PT_XLA_DEBUG_MAX_FRAME.get()
    lines = [f"  {frame.name} ({frame.filename}:{frame.lineno})" for frame in stack[start:]]
    return lines if len(lines) <= limit else [*lines[:limit], "  .........."]


def _write(kind: str, lines: list[str]) -> None:
    prefix = f"{kind} Analysis: "
    rows = ["", prefix + "=" * _WIDTH, *(prefix + line for line in lines), prefix + "-" * _WIDTH, prefix + "=" * _WIDTH]
    text = "\n".join(rows) + "\n"
    path = _config.PT_XLA_DEBUG_FILE.get()
    if path is None:
        sys.stderr.write(text)
        return
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError as error:  # the program goes on
        sys.stderr.write(f"[debug] PT_XLA_DEBUG_FILE={path!r} cannot be written ({error}); here instead:{text}")
