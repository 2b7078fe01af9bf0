"""Finds the operators between the marks of a composite, and the order in which the graph is then lowered."""

from __future__ import annotations

import graphlib
import json
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla._core.graph.library import XLA_LIB

MARKS = ("xla.mark_tensor.default", "xla.mark_boundary.default")


@dataclass(frozen=True)
class Boundary:
    """A mark: where a composite begins or ends."""

    name: str
    position: int  # which of the composite's operands or results the marked value is
    instance: str  # tells composites of one name from each other
    is_input: bool  # whether the value is an operand
    attributes: Mapping[str, Any]  # of the composite, from the marks of its results


@dataclass(frozen=True)
class CompositeRegion:
    """A composite in a graph."""

    name: str
    attributes: Mapping[str, Any]
    inputs: tuple[int, ...]  # marks of the operands, in their order
    members: tuple[int, ...]  # what it consists of, in the graph's order; the marks of the results are among them
    outputs: tuple[int, ...]  # marks of the results, in their order


def install() -> None:
    """Registers the operator that marks are recorded as; called once, at import."""
    XLA_LIB.define("mark_boundary(Tensor x, str name, int pos, str id, bool is_input, str attr) -> Tensor")
    XLA_LIB.impl("mark_boundary", lambda x, *_: torch.empty_like(x), "Meta")


def boundary(arguments: Sequence[Any]) -> Boundary:
    """The mark that an operator of `MARKS` is, from its arguments after the tensor."""
    name, position, instance, is_input, attributes = arguments
    if isinstance(attributes, str):
        attributes = json.loads(attributes)
    return Boundary(name, position, instance, is_input, dict(attributes or ()))


def plan(
    boundaries: Mapping[int, Boundary],
    operands: Sequence[Collection[int]],
    results: Collection[int],
    free: Set[int] = frozenset(),
) -> list[int | CompositeRegion]:
    """The order in which a graph is lowered, with a region for what lies between the marks of one composite.

    A composite that lacks a mark, or shares operators with another one, gets no region: its marks have no effect. If a
    node inside of a region is needed outside and is no result of it, it is computed there again. `boundaries` maps the
    nodes that are marks to what these say, `operands` has for each node the earlier nodes that it reads, and `results`
    are results of the graph. The nodes in `free` read nothing, may be computed anywhere, and belong to each region that
    needs them.
    """
    regions = _regions(boundaries, operands, free)
    of_result = {node: number for number, region in enumerate(regions) for node in region.outputs}
    inside = {node for region in regions for node in region.members}
    alone = {node for node in range(len(operands)) if node not in inside}
    reads = [{x for node in r.members for x in operands[node]}.difference(r.members).union(r.inputs) for r in regions]
    worklist = [x for node in alone for x in operands[node]] + list(results) + [x for group in reads for x in group]
    while worklist:
        node = worklist.pop()
        if node not in alone and node not in of_result:
            alone.add(node)
            worklist += operands[node]
    sorter: graphlib.TopologicalSorter[Any] = graphlib.TopologicalSorter()

    def unit(node: int) -> Any:
        return ("region", of_result[node]) if node in of_result else node

    for node in sorted(alone):
        sorter.add(node, *(unit(x) for x in operands[node]))
    for number, group in enumerate(reads):
        sorter.add(("region", number), *(unit(x) for x in sorted(group)))
    try:
        return [x if isinstance(x, int) else regions[x[1]] for x in sorter.static_order()]
    except graphlib.CycleError:  # two composites that each need a result of the other
        return list(range(len(operands)))


def _regions(
    boundaries: Mapping[int, Boundary], operands: Sequence[Collection[int]], free: Set[int]
) -> list[CompositeRegion]:
    groups: dict[tuple[str, str], list[int]] = {}
    for node, mark in boundaries.items():
        groups.setdefault((mark.name, mark.instance), []).append(node)
    regions: list[CompositeRegion] = []
    claimed_nodes: set[int] = set()
    for (name, _), marks in groups.items():
        marks.sort(key=lambda node: boundaries[node].position)
        inputs = [node for node in marks if boundaries[node].is_input]
        outputs = [node for node in marks if not boundaries[node].is_input]
        below: set[int] = set()
        for node, reads in enumerate(operands):
            if any(x in below or x in inputs for x in reads):
                below.add(node)
        above: set[int] = set()
        worklist = list(outputs)
        while worklist:
            node = worklist.pop()
            if node not in above and node not in inputs:
                above.add(node)
                worklist += operands[node]
        members = (below | free) & above
        is_complete = inputs and outputs and members.issuperset(outputs) and below.isdisjoint(inputs)
        if is_complete and claimed_nodes.isdisjoint(members - free):
            claimed_nodes |= members - free
            attributes = {k: v for node in outputs for k, v in boundaries[node].attributes.items()}
            regions.append(CompositeRegion(name, attributes, tuple(inputs), tuple(sorted(members)), tuple(outputs)))
    return regions
