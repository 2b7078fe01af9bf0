"""Checks the graphs of a `torch_xla.compile` region: none before its end (``full_graph``), or at most so many.

The barrier passes each graph to `before_run` ahead of compiling it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from torch_xla import _bindings
from torch_xla._core.compile import options as compiler_options
from torch_xla._core.graph.graph import Graph, Node
from torch_xla._core.report import recompiles
from torch_xla._errors import GraphLimitError, message


@dataclass
class AcceptedGraphs:
    """The different graphs one function has had, by key."""

    graphs: dict[str, Graph] = field(default_factory=dict)

    def check(self, key: str, describe: Callable[[], Graph], limit: int) -> None:
        """Accepts a graph, or raises `GraphLimitError` with what differs from the accepted ones."""
        if key in self.graphs:
            return
        graph = describe()
        if len(self.graphs) >= limit:
            raise GraphLimitError(_limit_exceeded(graph, list(self.graphs.values()), limit))
        self.graphs[key] = graph


@dataclass(eq=False)  # of two that are alike each ends by itself
class Region:
    """One running ``with torch_xla.compile(...)`` block, or call of a compiled function."""

    name: str | None = None
    full_graph: bool = False
    max_different_graphs: int | None = None
    session: AcceptedGraphs = field(default_factory=AcceptedGraphs)
    options: compiler_options.Options | None = None  # of the device's compiler; None for those in force outside of it
    closing: bool = False


class _RegionStack(threading.local):
    """The regions of one thread: they do not concern what other threads do."""

    def __init__(self) -> None:
        self.stack: list[Region] = []


_thread = _RegionStack()
allowed = True  # whether graphs may run at all


def allow(on: bool) -> None:
    """Sets `allowed`."""
    global allowed
    allowed = on


def stack() -> list[Region]:
    """The regions of this thread, the innermost last."""
    return _thread.stack


def current() -> Region | None:
    """The innermost region, or None."""
    return _thread.stack[-1] if _thread.stack else None


def name() -> str | None:
    """Name of the innermost region that has one: the name graphs get in messages and dumps."""
    return next((region.name for region in reversed(stack()) if region.name), None)


@contextmanager
def entered(region: Region) -> Iterator[Region]:
    """Makes a region the innermost one."""
    stack().append(region)
    try:
        with nullcontext() if region.options is None else compiler_options.within(region.options):
            yield region
    finally:
        stack().remove(region)


def refuse_captured(what: str, device: int | None = None) -> None:
    """Called before what cannot be a part of a graph that is captured; RuntimeError where there is a capture.

    This thread captures, or another one on the device; None where only what this thread does matters.
    """
    if _bindings.captures_here() or (device is not None and _bindings.is_captured(device)):
        line = _bindings.user_frame()
        raise RuntimeError(
            message(
                "graph",
                f"got {what} while a graph is captured" + (f", at {line}" if line else ""),
                expected="what is recorded on the device alone",
                do="do it before the capture, or after a replay",
            )
        )


def before_run(key: str, line: Callable[[], str | None], describe: Callable[[], Graph]) -> str | None:
    """Called with every graph before it is compiled or run; gives what it is called, as `name` tells.

    The key is equal for equal graphs; `line` is called only for an error, `describe` only when a limit is checked.
    Raises GraphLimitError where a surrounding region forbids the graph.
    """
    if not allowed:
        raise GraphLimitError(
            message(
                "compile",
                "Unexpected execution happens inside the compiled function, exiting",
                do="allow it with _XLAC._set_allow_execution(True)",
            )
        )
    for region in stack():
        if region.full_graph and not region.closing:
            raise GraphLimitError(
                message(
                    "compile",
                    f"Unexpected execution happens inside the compiled function, exiting: full_graph=True was asked of "
                    f"{region.name or 'the region'}, but a value was read or a barrier issued inside it"
                    + (f" at {user_line}" if (user_line := line()) else ""),
                    do="move the read after the region, or leave full_graph out",
                )
            )
        if region.max_different_graphs is not None:
            region.session.check(key, describe, region.max_different_graphs)
    return name() if stack() else None


def _node_text(node: Node) -> str:
    """A node as the messages show it: ``[] aten::add, xla_shape=f32[2,3]{1,0}, dynamic_dims: ()``."""
    from torch_xla._core.graph.graph_text import meta_text

    shapes = []
    for meta in node.outs:
        if meta is not None:
            layout = ",".join(str(dim) for dim in reversed(range(len(meta.shape))))
            shapes.append(meta_text(meta) + (f"{{{layout}}}" if meta.shape else ""))
    text = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
    return f"[] {'::'.join(node.op.split('.')[:2])}, xla_shape={text}, dynamic_dims: ()"


def _common(accepted: Sequence[str], got: Sequence[str]) -> int:
    length = 0
    for one, other in zip(accepted, got, strict=False):
        if one != other:
            break
        length += 1
    return length


def _limit_exceeded(graph: Graph, accepted: list[Graph], limit: int) -> str:
    """Says how the accepted graphs that agree longest go on where this one differs, and why it is a new one."""
    got = [_node_text(node) for node in graph.nodes]
    accepted_texts = [[_node_text(node) for node in other.nodes] for other in accepted]
    lengths = [_common(got, nodes) for nodes in accepted_texts]
    depth = max(lengths, default=0)
    ways = [
        nodes[depth] if depth < len(nodes) else "the end of the function"
        for nodes, length in zip(accepted_texts, lengths, strict=True)
        if length == depth
    ]
    ways = list(dict.fromkeys(ways))
    lines = [f"[compile] Maximum number of different graphs allowed per function exceeded: {limit}"]
    if depth < len(got):
        lines.append(f"Got: {got[depth]}")
    else:
        lines.append(f"Reached the end of the function at: {got[-1] if got else 'its start'}")
    if len(ways) == 1:
        lines.append(f"Expected: {ways[0]}")
    else:
        lines.append("Expected either of:")
        lines += [f"  - {way}" for way in ways]
    nearest = recompiles.nearest_of(graph, accepted)
    if nearest is not None:
        lines.append("What differs from the nearest one:")
        lines += [f"  - {difference}" for difference in recompiles.compare(graph, nearest)]
    return "\n".join(lines) + "\n"
