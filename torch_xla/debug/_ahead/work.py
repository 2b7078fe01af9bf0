"""Counts what a program does in a run on a chip: products, memory, links; and what that takes at least."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import chips, described, placement, shardings
from torch_xla._core.graph.graph import Edge, Graph, Input, Node, Number
from torch_xla.debug._ahead import hlo
from torch_xla.debug._ahead.report import Collective, Program

_PARAMETERS = "parameters and gradients"
# Axes of meshes that the script made: the devices' numbers, the lengths, the names.
Axes = tuple[Any, Sequence[int], Sequence[str]]


def count(program: Program, graph: Graph, executable: Any, stats: Any, meshes: Sequence[Axes]) -> None:
    """Fills in the work of a program that was compiled."""
    place = placement.of(graph.device)
    parts = len(place.devices) if place.mesh else 1
    program.flops = sum(_flops(graph, node) for node in graph.nodes) / parts
    program.nbytes = float(stats.argument_size_in_bytes + stats.output_size_in_bytes)
    if len(place.devices) > 1:
        text = executable.loaded.hlo_modules()[0].to_string()
        program.collectives = _named(hlo.collectives(text), len(place.devices), meshes)
        program.theory = in_theory(graph, place.mesh)
    if described.platform() == "tpu":
        chip = chips.find(described.topology() or "")
        received = sum(collective.received for collective in program.collectives)
        program.bounds = {
            "products": program.flops / chip.peak,
            "memory": program.nbytes / chip.bandwidth,
            "links": received / (chip.links / 2),
        }


def _flops(graph: Graph, node: Node) -> float:
    """Floating-point operations of a product or a convolution that was recorded."""
    formula = _formulas().get(node.op.rpartition(".")[0])
    if formula is None:
        return 0.0
    shapes = []
    for edge in node.inputs:
        source = graph.meta(edge)
        shapes.append(None if source is None else tuple(source.shape))

    def argument(arg: Any) -> Any:
        if isinstance(arg, list):
            return [argument(each) for each in arg]
        return shapes[arg.index] if isinstance(arg, Input) else arg.value if isinstance(arg, Number) else arg

    outs = [tuple(out.shape) if out is not None else None for out in node.outs]
    try:
        return float(formula(*map(argument, node.args), out_val=outs[0] if len(outs) == 1 else tuple(outs)))
    except Exception:  # PyTorch's formula for arguments of another kind
        return 0.0


@functools.cache
def _formulas() -> dict[str, Callable[..., Any]]:
    from torch.utils.flop_counter import flop_registry

    return {str(packet): formula for packet, formula in flop_registry.items()} | {
        "aten.linear": _linear,
        "aten.linear_backward": _linear_backward,
    }


def _linear(x: Sequence[int], weight: Sequence[int], *_: Any, out_val: Any = None) -> int:
    return 2 * math.prod(x) * weight[0]


def _linear_backward(
    x: Sequence[int], grad: Sequence[int], weight: Sequence[int], wanted: Sequence[bool], out_val: Any = None
) -> int:
    return 2 * math.prod(x) * weight[0] * sum(wanted[:2])


def _named(found: Sequence[hlo.Found], devices: int, meshes: Sequence[Axes]) -> list[Collective]:
    """Collectives by the axes that they are over; those that are alike but for the groups are one."""
    sums: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in found:
        groups = each.groups or (tuple(range(devices)),)  # none are all
        entry = sums[each.kind, len(groups[0]), _axes(each.kind, groups, meshes)]
        entry[0] += each.count
        entry[1] += each.nbytes
    named = [Collective(kind, n, nbytes, group, axes) for (kind, group, axes), (n, nbytes) in sums.items()]
    return sorted(named, key=lambda collective: -collective.nbytes)


def _axes(kind: str, listed: tuple[tuple[int, ...], ...], meshes: Sequence[Axes]) -> str:
    """The axes of a mesh that some groups of devices are along, the youngest mesh first."""
    groups = {frozenset(group) for group in listed}
    for ids, lengths, names in reversed(meshes):
        for count in range(1, len(names) + 1):
            for chosen in itertools.combinations(range(len(names)), count):
                rest = [axis for axis in range(len(names)) if axis not in chosen]
                size = math.prod(lengths[axis] for axis in chosen)
                rows = ids.reshape(lengths).transpose([*rest, *chosen]).reshape(-1, size)
                along = {frozenset(map(int, row)) for row in rows}
                inside = kind == "collective-permute" and all(any(g <= row for row in along) for g in groups)
                if inside or groups == along:
                    return ", ".join(str(names[axis]) for axis in chosen if lengths[axis] > 1) or str(names[chosen[0]])
    return ""


def in_theory(graph: Graph, mesh: bool) -> dict[str, dict[str, float]]:
    """Bytes a chip, by what for and kind of collective, that a training step must have by theory; {} if unknown.

    A parameter that is split over devices which have different rows of the batch is gathered for the forward and for
    the backward pass, and its gradient reduced and scattered; the gradient of another is reduced. A product along a
    dimension of a weight that is split over other devices is a sum of theirs.
    """
    if not graph.donated:
        return {}
    causes = _over_mesh(graph) if mesh else {_PARAMETERS: _of_modules(graph.device)}
    return {cause: dict(kinds) for cause, kinds in causes.items() if any(kinds.values())}


def _over_mesh(graph: Graph) -> dict[str, dict[str, float]]:
    if not graph.leaf_placements:
        return {}
    held = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Parameter) and each.requires_grad]
    own_device = [p for p in held if p.device == torch.device("xla", graph.device)]
    parameters = [(tuple(p.shape), p.element_size(), _bindings.placement_of(p)) for p in own_device]
    kinds = {(shape, number) for shape, _, number in parameters}
    lengths = shardings.prime_factors(len(placement.of(graph.device).devices))
    batch: set[int] = set()
    for leaf, number in zip(graph.leaves, graph.leaf_placements, strict=True):
        if (tuple(leaf.shape), number) not in kinds:
            batch |= {axis for axes in _split(number) for axis in axes}
    sums: dict[str, float] = defaultdict(float)
    for shape, itemsize, number in parameters:
        own = {axis for axes in _split(number) for axis in axes}
        part = math.prod(shape) * itemsize / _devices(lengths, own)
        if own & batch:
            sums["all-gather"] += 2 * part * _devices(lengths, own & batch)
            sums["reduce-scatter"] += part
        elif batch:
            sums["all-reduce"] += part
    products = sum(_summed(graph, lengths, batch).values())
    return {_PARAMETERS: sums, "products of split weights": {"all-reduce": products}}


def _devices(lengths: Sequence[int], axes: Iterable[int]) -> int:
    return math.prod(lengths[axis] for axis in axes)


def _summed(graph: Graph, lengths: Sequence[int], batch: set[int]) -> dict[tuple[bool, Edge], float]:
    """Bytes a chip of each value that is a sum over devices, by the pass that it is of and the layers' input or result.

    Layers with one input, such as those of queries, keys and values, have one sum of their gradients.
    """
    sums: dict[tuple[bool, Edge], float] = {}
    for slot, node in enumerate(graph.nodes):
        name = node.op.rpartition(".")[0]
        backward, out = name == "aten.linear_backward", node.outs[0]
        if name not in ("aten.linear", "aten.linear_backward") or out is None:
            continue
        weight = node.inputs[2 if backward else 1]
        while not weight.leaf and len(graph.nodes[weight.slot].inputs) == 1:  # a copy in another dtype, say
            weight = graph.nodes[weight.slot].inputs[0]
        dims = _split(graph.leaf_placements[weight.slot]) if weight.leaf else ()
        along, across = (dims if backward else dims[::-1]) if len(dims) == 2 else ((), ())
        if set(along) - batch:
            share = _devices(lengths, batch | set(across))
            key = backward, node.inputs[0] if backward else Edge(False, slot, 0)
            sums[key] = math.prod(out.shape) * out.dtype.itemsize / share
    return sums


def _of_modules(device: int) -> dict[str, float]:
    """What the modules of a job that PyTorch splits, or copies, must have."""
    from torch.distributed.fsdp import FSDPModule

    kinds = FSDPModule, torch.nn.parallel.DistributedDataParallel
    modules = [held for held in gc.get_objects() if issubclass(type(held), kinds)]
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    sums: dict[str, float] = defaultdict(float)
    for parameter in parameters.values():
        nbytes = float(parameter.numel() * parameter.element_size())
        spread = getattr(parameter, "placements", ())  # of a DTensor
        sizes = [parameter.device_mesh.size(dim) for dim, placement in enumerate(spread) if placement.is_shard()]
        if parameter.device == torch.device("xla", device) and sizes:
            sums["all-gather"] += 2 * nbytes / math.prod(sizes[1:])
            sums["reduce-scatter"] += nbytes / math.prod(sizes)
        elif parameter.device == torch.device("xla", device):
            sums["all-reduce"] += nbytes
    return sums


def _split(number: int) -> tuple[tuple[int, ...], ...]:
    tiling = shardings.by_number(number)
    if tiling is None:
        return ()
    return shardings.axes_of(tiling, tuple(shardings.prime_factors(len(tiling.order)))) or ()
