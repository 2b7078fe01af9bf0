"""Lowers manual sharding: between `ENTER` and `LEAVE` an operator computes on each device's shard.

Elsewhere XLA partitions. A value between the two is one array, whose first dimension is the devices. An operator on it
is the operator on one shard, in a `shard_map`. XLA merges neighbouring ones into one region, so nothing moves between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from torch_xla._core.device import placement, shardings
from torch_xla._core.graph.graph import Edge, Graph, Node
from torch_xla._errors import message

ENTER, LEAVE = "xla.full_to_shard.default", "xla.shard_to_full.default"
REDUCE, SCATTER = "xla.spmd_all_reduce.default", "xla.spmd_reduce_scatter.default"
_REDUCTIONS = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def find(graph: Graph) -> frozenset[int]:
    """The nodes whose results are parts."""
    part_nodes: set[int] = set()
    if shardings.MANUAL not in graph.leaf_placements and not any(node.op == ENTER for node in graph.nodes):
        return frozenset()
    for slot, node in enumerate(graph.nodes):
        inside = any(is_part(graph, edge, part_nodes) for edge in node.inputs)
        if node.op == ENTER or (inside and node.op != LEAVE):
            part_nodes.add(slot)
    return frozenset(part_nodes)


def is_part(graph: Graph, edge: Edge, parts: Container[int]) -> bool:
    """Whether what an edge carries is a part, given the nodes whose results are parts."""
    if edge.leaf:
        return bool(graph.leaf_placements) and graph.leaf_placements[edge.slot] == shardings.MANUAL
    return edge.slot in parts


def compute(
    node: Node,
    tensors: Sequence[Any],
    inside: Sequence[bool],
    numbers: Sequence[Any],
    seed: Any,
    rule: Callable[[list[Any], list[Any], Any], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """The results of an operator on parts, or of one that begins or ends them.

    `inside` says which operands are parts, `rule` gives its results for one device's operands, numbers and seed.
    """
    if node.op == ENTER:
        spec = shardings.sharding(shardings.by_number(node.args[1]), placement.of(0).devices).spec
        return (_mapped(lambda x: x[None], (spec,), _parts())(tensors[0]),)
    if node.op == LEAVE:
        spec = shardings.sharding(shardings.by_number(node.args[1]), placement.of(0).devices).spec
        return (_mapped(lambda x: x[0], (_parts(),), spec)(tensors[0]),)

    def one(tensors: list[Any], numbers: list[Any], seed: Any) -> tuple[Any, ...]:
        local_tensors = [x[0] if split else x for x, split in zip(tensors, inside, strict=True)]
        if node.op == REDUCE:
            return (_reduce(node, local_tensors[0])[None],)
        if node.op == SCATTER:
            return (_scatter(node, local_tensors[0])[None],)
        return tuple(x if x is None else x[None] for x in rule(local_tensors, numbers, seed))

    operand_specs = [_parts() if split else PartitionSpec() for split in inside]
    replicated_specs = jax.tree.map(lambda _: PartitionSpec(), (list(numbers), seed))
    return _mapped(one, (operand_specs, *replicated_specs), _parts())(list(tensors), list(numbers), seed)


def _mesh() -> Any:
    return shardings.sharding(None, placement.of(0).devices).mesh


def _parts() -> PartitionSpec:
    return PartitionSpec(_mesh().axis_names)


def _mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _axes(groups: Sequence[int], size: int) -> tuple[str, ...]:
    """The axes of the mesh along which these groups of devices, end to end, lie."""
    names, lengths = _mesh().axis_names, _mesh().devices.shape
    device_groups = {frozenset(groups[i : i + size]) for i in range(0, len(groups), size)}
    strides = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    first = next(group for group in device_groups if 0 in group)
    along = [i for i, stride in enumerate(strides) if stride in first]
    others = [i for i in range(len(names)) if i not in along]
    if device_groups != {frozenset(fiber) for fiber in _fibers(lengths, others, along)}:
        got = f"got groups {sorted(map(sorted, device_groups))}"
        raise NotImplementedError(message("spmd", got, expected="groups along axes of a mesh of all devices"))
    return tuple(names[i] for i in along)


def _fibers(lengths: Sequence[int], others: Sequence[int], along: Sequence[int]) -> list[list[int]]:
    import numpy as np

    devices = np.arange(math.prod(lengths)).reshape(lengths).transpose(*others, *along)
    return devices.reshape(-1, math.prod(lengths[i] for i in along)).tolist()


def _reduce(node: Node, part: Any) -> Any:
    _, reduction, scale, groups, size = node.args
    if reduction not in _REDUCTIONS:
        raise NotImplementedError(message("spmd", f"got reduction {reduction}", expected=f"one of {list(_REDUCTIONS)}"))
    return (_REDUCTIONS[reduction](part, _axes(groups, size)) * scale).astype(part.dtype)


def _scatter(node: Node, part: Any) -> Any:
    _, reduction, scale, dim, groups, size = node.args
    if reduction != "sum":
        raise NotImplementedError(message("spmd", f"got reduction {reduction}", expected="sum"))
    axes = _axes(groups, size)
    summed = jax.lax.psum_scatter(part, axes, scatter_dimension=dim % part.ndim, tiled=True)
    return (summed * scale).astype(part.dtype)
