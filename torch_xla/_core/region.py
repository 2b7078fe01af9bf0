"""What `torch_xla.compile` promises about the graphs of a region, and the checks of it.

The barrier tells each graph to `before_run` ahead of compiling it. A region may forbid graphs altogether until its end
(``full_graph``) or limit how many different ones its function may have (``max_different_graphs``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from torch_xla._errors import GraphLimitError, message


@dataclass
class Session:
    """The different graphs one function has had, as node descriptions in order."""

    graphs: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)

    def check(self, key: Hashable, nodes: Callable[[], Sequence[str]], limit: int) -> None:
        """Accepts a graph, or raises `GraphLimitError` with the first node that no accepted graph has there."""
        if key in self.graphs:
            return
        described = tuple(nodes())
        if len(self.graphs) >= limit:
            raise GraphLimitError(_difference(described, list(self.graphs.values()), limit))
        self.graphs[key] = described


@dataclass
class Region:
    """One running ``with torch_xla.compile(...)`` block, or call of a compiled function."""

    name: str | None = None
    full_graph: bool = False
    max_different_graphs: int | None = None
    session: Session = field(default_factory=Session)
    closing: bool = False


# A stack of the process, not of a thread: autograd runs backward functions in threads of its own.
_regions: list[Region] = []
_allowed = True


def allow(on: bool) -> None:
    """Whether graphs may run at all."""
    global _allowed
    _allowed = on


def allowed() -> bool:
    """What `allow` set."""
    return _allowed


def current() -> Region | None:
    """The innermost region, or None."""
    return _regions[-1] if _regions else None


def name() -> str | None:
    """Name of the innermost region that has one: the name graphs get in messages and dumps."""
    return next((region.name for region in reversed(_regions) if region.name), None)


@contextmanager
def entered(region: Region) -> Iterator[Region]:
    """Makes a region the innermost one."""
    _regions.append(region)
    try:
        yield region
    finally:
        _regions.remove(region)


def before_run(key: Hashable, nodes: Callable[[], Sequence[str]]) -> None:
    """Called with every graph before it is compiled or run.

    Args:
        key: Equal for equal graphs.
        nodes: Gives the graph's nodes as text, in order; called only when a limit is checked.

    Raises:
        GraphLimitError: a surrounding region forbids this graph.
    """
    if not _allowed:
        raise GraphLimitError(
            message(
                "compile",
                "Unexpected execution happens inside the compiled function, exiting",
                do="allow it with _XLAC._set_allow_execution(True)",
            )
        )
    for region in _regions:
        if region.full_graph and not region.closing:
            raise GraphLimitError(
                message(
                    "compile",
                    f"Unexpected execution happens inside the compiled function, exiting: full_graph=True was asked of "
                    f"{region.name or 'the region'}, but a value was read or a barrier issued inside it",
                    do="move the read after the region, or leave full_graph out",
                )
            )
        if region.max_different_graphs is not None:
            region.session.check(key, nodes, region.max_different_graphs)


def node_text(op: str, outputs: Sequence[tuple[torch.dtype, Sequence[int]]]) -> str:
    """A node as the messages show it: ``[] aten::add, xla_shape=f32[2,3]{1,0}, dynamic_dims: ()``.

    Args:
        op: Overload name, ``aten.add.Tensor``.
        outputs: dtype and shape of each output.
    """
    from torch_xla.ops import dtypes

    shapes = []
    for dtype, shape in outputs:
        kind = dtypes.xla_name(dtype)
        layout = ",".join(str(dim) for dim in reversed(range(len(shape))))
        shapes.append(f"{kind}[{','.join(map(str, shape))}]" + (f"{{{layout}}}" if shape else ""))
    text = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
    return f"[] {'::'.join(op.split('.')[:2])}, xla_shape={text}, dynamic_dims: ()"


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def _difference(got: tuple[str, ...], known: list[tuple[str, ...]], limit: int) -> str:
    """Compares with the known graphs that agree longest, and says how they go on there."""
    lengths = [_common(got, graph) for graph in known]
    depth = max(lengths, default=0)
    ways = [
        graph[depth] if depth < len(graph) else "the end of the function"
        for graph, length in zip(known, lengths, strict=True)
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
    return "\n".join(lines)
