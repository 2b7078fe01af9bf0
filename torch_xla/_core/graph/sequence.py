"""Numbers the collectives of a graph, for processes to compare, and describes each in words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch_xla._core.graph.graph import Graph, Node
from torch_xla.ops import collective_call

_CAPACITY = 4096

Entry = tuple[str, str]  # what a process runs, and where that comes from, in words
# What collectives are, with where the latest such comes from, by their numbers.
_meanings: dict[int, Entry] = {}


def is_collective(node: Node) -> bool:
    """Whether a node is what several processes do together."""
    return node.op == collective_call.NAME


def _described(graph: Graph, node: Node) -> str:
    return described(collective_call.parse(node.args[1]), [m for m in map(graph.meta, node.inputs) if m is not None])


def described(call: collective_call.Call, inputs: Sequence[Any]) -> str:
    """A collective in words, with the shapes and dtypes of its inputs."""
    types = [f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in inputs]
    extra = f" from place {call.root}" if call.kind == "broadcast" else f" {call.pairs}" if call.pairs else ""
    shown = types if len(types) <= 4 else [*types[:3], f"{len(types) - 3} more"]
    return f"{call}{extra} of {', '.join(shown)} among {[list(g) for g in call.groups]}"


def number_of(text: str) -> int:
    """A number for a text that is the same in all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def numbered(text: str, where: str) -> int:
    """The number of a collective, which is remembered with where it comes from."""
    number = number_of(text)
    if len(_meanings) >= _CAPACITY:
        _meanings.clear()
    _meanings[number] = (text, where)
    return number


def collectives(graph: Graph, rank: int) -> dict[tuple[int, ...], list[Entry]]:
    """For each group of a process, its collectives in a graph."""
    by_group: dict[tuple[int, ...], list[Entry]] = {}
    for node in graph.nodes:
        if is_collective(node):
            group = collective_call.parse(node.args[1]).group_of(rank)
            where = f"recorded at {node.frame or 'an unknown line'}"
            by_group.setdefault(group, []).append((_described(graph, node), where))
    return by_group


def numbers(graph: Graph, rank: int) -> dict[tuple[int, ...], list[int]]:
    """For each group of a process, the numbers of its collectives in a graph."""
    return {group: [numbered(*entry) for entry in entries] for group, entries in collectives(graph, rank).items()}


def part_of(graph: Graph, rank: int) -> str:
    """A process's role in the collectives of a graph; processes with equal roles have equal programs."""
    return str([(len(group), group_numbers) for group, group_numbers in numbers(graph, rank).items()])


def meaning(number: int) -> Entry:
    """The collective that a number stands for, with where it was recorded."""
    return _meanings.get(number, ("a collective that this process does not know", "recorded at an unknown line"))


def difference(*sides: tuple[int, Sequence[str]]) -> str:
    """The difference between processes in words, from their ranks and entries."""
    runs = ", ".join(f"rank {rank} runs {what} ({where})" for rank, (what, where) in sorted(sides))
    return f"[job] the processes differ in what they do together: {runs}"
