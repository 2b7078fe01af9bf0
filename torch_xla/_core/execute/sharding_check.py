"""Runs sharded programs without shardings too, and names the first value that differs (``XLA_SPMD_VERIFY=1``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torch_xla import _bindings, _config
from torch_xla._core.device import client, placement, shardings, transfer
from torch_xla._core.graph.graph import Graph, Node, describe
from torch_xla._core.lower import lowering, placing
from torch_xla._errors import message

ASKED_BY = (_config.XLA_SPMD_VERIFY,)
_TOLERANCES = {2: 2e-2, 4: 1e-3, 8: 1e-9}  # of the largest value, by bytes of a floating-point number

_compiled: dict[tuple[str, tuple[int, ...]], tuple[Any, Any]] = {}


class ShardingError(RuntimeError):
    """A program with splits computes something else than without."""


def before_run(graph: _bindings.Graph) -> None:
    """Compares all values of a graph, where that is asked for; ShardingError where one differs."""
    if not _config.XLA_SPMD_VERIFY.get() or not placement.of(graph.device).mesh:
        return
    described = describe(graph)
    places = [(slot, i) for slot, node in enumerate(described.nodes) for i, m in enumerate(node.outs) if m is not None]
    leaves = [
        transfer.download(location, meta.shape, meta.dtype)
        for location, meta in zip(graph.leaf_locations(), described.leaves, strict=True)
    ]
    key = graph.key, described.numbers
    split, unsplit = _compiled.get(key) or _compiled.setdefault(key, _programs(described, places))
    numbers = [transfer.put(vector, graph.device) for vector in graph.packed_numbers() if vector.size]
    with client.x64():
        inputs = [
            transfer.upload(leaf, graph.device, number)
            for leaf, number in zip(leaves, described.leaf_placements, strict=True)
        ]
        results = split(*inputs, *numbers)
        expected = unsplit(*(transfer.upload(leaf, graph.device) for leaf in leaves), *numbers)
    for (slot, result), value, other in zip(places, results, expected, strict=True):
        _compare(described.nodes[slot], result, value, other)


def _programs(described: Graph, places: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    """The graph with all its values as results, split and whole."""
    free = (shardings.UNSPECIFIED,) * len(places)
    probed = replace(described, outputs=tuple(places), donated=(), aliased_outputs=(), packs=(), output_placements=free)
    nodes = tuple(
        replace(node, args=(node.args[0], shardings.EXPLICITLY_REPLICATED)) if node.op == placing.OPERATOR else node
        for node in described.nodes
    )
    replicated = (shardings.REPLICATED,) * len(described.leaves)
    unsplit = replace(
        probed, nodes=nodes, leaf_placements=replicated, output_placements=(shardings.REPLICATED,) * len(places)
    )
    with client.x64():
        return tuple(lowering.lower(g, "sharding_check").stage.compile() for g in (probed, unsplit))  # type: ignore[return-value]


def _compare(node: Node, result: int, value: Any, other: Any) -> None:
    actual, expected = np.asarray(value), np.asarray(other)
    if actual.size == 0:
        return
    if not _is_inexact(actual):
        same = bool(np.array_equal(actual, expected))
    else:
        actual, expected = (x.astype(np.complex128) for x in (actual, expected))
        scale = float(np.max(np.abs(np.nan_to_num(expected, posinf=0, neginf=0))))
        tolerance = _TOLERANCES[min(max(np.asarray(other).dtype.itemsize, 2), 8)]
        same = bool(np.allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
    if not same:
        where = f", recorded at {node.frame}" if node.frame else ""
        got = f"result {result} of {node.op} differs between the sharded program and the unsharded one{where}"
        raise ShardingError(message("spmd", got, do="report it, with the shardings of its inputs"))


def _is_inexact(array: Any) -> bool:
    return array.dtype.kind in "fc" or "float" in array.dtype.name
