"""Reads from the text of a compiled program which collectives it has, over whom, and how often each runs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(rf"= (.*?) ({_KINDS})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]\s*"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BOUND = re.compile(r"= [su](?:32|64)\[\]\S* constant\((\d+)\)")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8, "c64": 8}


@dataclass(frozen=True)
class Found:
    """A collective, or several alike, in a program's text."""

    kind: str
    count: int
    nbytes: int  # of the results on a device, of all of them
    groups: tuple[tuple[int, ...], ...]  # numbers of the devices that take part together


def collectives(text: str) -> list[Found]:
    """The collectives of a program; one in a loop counts as often as it runs.

    One in several steps, between which XLA computes, is told by its chain and counted once; one whose result is cut at
    once into what each device keeps is a reduce-scatter.
    """
    computations = _computations(text)
    runs = _runs(computations)
    sums: dict[tuple[str, tuple[tuple[int, ...], ...]], list[int]] = defaultdict(lambda: [0, 0])
    chains: set[str] = set()
    for name, (_, lines) in computations.items():
        for line in lines:
            match = _OPERATION.search(line)
            if match is None or not runs[name]:
                continue
            chain = re.search(r'chain_id="(\d+)"', line)
            if chain is not None and chain[1] in chains:
                continue
            if chain is not None:
                chains.add(chain[1])
            kind, groups = match[2], _groups(line)
            sizes = [size for size in _sizes(match[1]) if size]
            if match[3] and kind in ("all-gather", "collective-permute") and len(sizes) > 1:
                sizes = [max(sizes)]  # with what it is made of
            nbytes = sum(sizes)
            if name.startswith("all-reduce-scatter"):
                kind, nbytes = "reduce-scatter", nbytes // max(len(groups[0]) if groups else 1, 1)
            entry = sums[kind, groups]
            entry[0] += runs[name]
            entry[1] += nbytes * runs[name]
    return [Found(kind, count, nbytes, groups) for (kind, groups), (count, nbytes) in sorted(sums.items())]


def _computations(text: str) -> dict[str, tuple[bool, list[str]]]:
    """The lines of each computation, and whether it is the program itself."""
    found: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            lines = []
            found[head[2]] = bool(head[1]), lines
        elif "=" in line:
            lines.append(line)
    return found


def _runs(computations: dict[str, tuple[bool, list[str]]]) -> dict[str, int]:
    """How often each computation runs; of a loop whose length is not known, once."""
    callees: dict[str, list[tuple[str, int]]] = {}
    for name, (_, lines) in computations.items():
        calls = callees[name] = []
        for line in lines:
            trips = _trips(line, computations) if " while(" in line else 1
            targets = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                targets += [branch.strip(" %") for branch in branches.split(",")]
            calls += [(target, trips) for target in targets if target in computations]
    runs = dict.fromkeys(computations, 0)
    # Callees stand before their callers in a program's text.
    for name in reversed(computations):
        if computations[name][0]:
            runs[name] = 1
        for callee, times in callees[name]:
            runs[callee] += runs[name] * times
    return runs


def _trips(line: str, computations: dict[str, tuple[bool, list[str]]]) -> int:
    """How often a loop turns: as it is told, else the number that its counter is compared with; else 1."""
    told, condition = _TRIPS.search(line), _CONDITION.search(line)
    if told is not None or condition is None:
        return int(told[1]) if told is not None else 1
    _, lines = computations.get(condition[1], (False, []))
    return max((int(bound[1]) for line in lines if (bound := _BOUND.search(line))), default=1) or 1


def _sizes(types: str) -> Iterator[int]:
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types):
        itemsize = 1 if dtype.startswith("f8") else _BYTES.get(dtype, 4)
        yield itemsize * math.prod(map(int, filter(None, dims.split(","))))


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", line)
    if listed is not None:
        rows = re.findall(r"\{([\d,]*)\}", listed[1])
        return tuple(tuple(map(int, filter(None, row.split(",")))) for row in rows)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        return _along_axes(line)
    shape, dims, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
    numbers = np.arange(math.prod(dims)).reshape(dims)
    numbers = numbers.transpose(order) if order else numbers
    return tuple(tuple(map(int, group)) for group in numbers.reshape(shape))


def _along_axes(line: str) -> tuple[tuple[int, ...], ...]:
    """Groups that are told by a mesh of the compiler's, and which of its axes, or parts of them, they are along."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line)
    if mesh is None:
        return ()
    lengths = {name: int(length) for name, length in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
    along = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", mesh[2])
    shape: list[int] = []
    places: dict[str, int] = {}
    for name, length in lengths.items():
        part = next(((int(before), int(size)) for axis, before, size in along if axis == name and size), None)
        before, size = part or (1, length)
        places[name] = len(shape) + 1
        shape += [before, size, length // (before * size)]
    chosen = [places[axis] for axis, _, _ in along]
    rest = [axis for axis in range(len(shape)) if axis not in chosen]
    rows = np.arange(math.prod(shape)).reshape(shape).transpose([*rest, *chosen])
    return tuple(tuple(map(int, row)) for row in rows.reshape(-1, math.prod(shape[axis] for axis in chosen)))
