"""The collectives of a graph: what they are, in words, and a number for each by which processes compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch_xla._core.graph.graph import Graph, Node
from torch_xla.ops import collective_call

_CAPACITY = 4096

# What collectives are, with the line that recorded the latest such, by their numbers.
_known: dict[int, tuple[str, str]] = {}


def is_collective(node: Node) -> bool:
    """Whether a node is what several processes do together."""
    return node.op == collective_call.NAME


def _described(graph: Graph, node: Node) -> str:
    metas = [graph.leaves[w.slot] if w.leaf else graph.nodes[w.slot].outs[w.result] for w in node.inputs]
    return described(collective_call.parse(node.args[1]), [m for m in metas if m is not None])


def described(call: collective_call.Call, inputs: Sequence[Any]) -> str:
    """A collective in words, with the shapes and dtypes of its inputs."""
    types = [f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in inputs]
    extra = f" from place {call.root}" if call.kind == "broadcast" else f" {call.pairs}" if call.pairs else ""
    shown = types if len(types) <= 4 else [*types[:3], f"{len(types) - 3} more"]
    return f"{call}{extra} of {', '.join(shown)} among {[list(g) for g in call.groups]}"


def number_of(text: str) -> int:
    """A number for a text that is the same in all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def numbered(text: str, line: str | None) -> int:
    """The number of a collective, which is remembered with the line that recorded it."""
    number = number_of(text)
    if len(_known) >= _CAPACITY:
        _known.clear()
    _known[number] = (text, line or "an unknown line")
    return number


def numbers(graph: Graph, rank: int) -> dict[tuple[int, ...], list[int]]:
    """For each group of a process, the numbers of its collectives in a graph."""
    numbers_by_group: dict[tuple[int, ...], list[int]] = {}
    for node in graph.nodes:
        if is_collective(node):
            number = numbered(_described(graph, node), node.frame)
            numbers_by_group.setdefault(collective_call.parse(node.args[1]).group_of(rank), []).append(number)
    return numbers_by_group


def said(what: Sequence[str]) -> str:
    """A meaning, with its line, in words."""
    return f"{what[0]} (recorded at {what[1]})"


def meaning(number: int) -> tuple[str, str]:
    """What a number stands for, and a line that recorded it."""
    return _known.get(number, ("a collective that this process does not know", "an unknown line"))
