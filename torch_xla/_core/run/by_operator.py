"""Running a graph operator by operator with PyTorch's CPU kernels, without a program (`csrc/run/by_operator`).

`hotness` says which graphs do until they are compiled. Others always do: a very small one behind a value that is read,
and small parts of a graph that would be compiled again and again because they grow, such as the tokens and positions of
`generate` (`Graph.divide`).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from torch_xla import _bindings, _config, _metrics, _timeline
from torch_xla._core.device import client, placement, splits, transfer
from torch_xla._core.graph import graph, sequence
from torch_xla._core.lower import lowering, manual
from torch_xla.ops import dtypes
from torch_xla.ops.fallback import from_numpy, to_numpy

_NUMBERS = {float: np.float64, int: np.int64, complex: np.complex128}


class CannotRun(Exception):
    """A graph has an operator that only a program computes."""


def on() -> bool:
    """Whether any graph runs so; a check of values wants them compiled, and CPU kernels compute 64-bit integers."""
    return _config.XLA_HOST_COMPUTE.get() and not (_config.XLA_CHECK_VALUES.get() or dtypes.shortens())


def divide(cut: _bindings.Graph, what: _bindings.Cut) -> list[_bindings.Cut]:
    """What to run before a graph is cut again, so that no part of it is a new program; nothing where it is one.

    Args:
        cut: The graph, which has no program yet.
        what: What it was made of.
    """
    parts = cut.divide(what) if on() else []
    if parts:
        _metrics.count("HostParts")
        if _timeline.recorder is not None:
            _timeline.mark("host parts", _bindings.user_frame())
    return parts


def run(cut: _bindings.Graph) -> bool:
    """Runs a graph operator by operator; False where only a program computes it, and it stays as it is.

    Args:
        cut: The graph; empty afterwards where this is True.

    Raises:
        LoweringError: An operator has neither a kernel that takes it nor a rule; names it and the user's line.
        ExecutionError: An earlier program failed; this graph was not started.
    """
    if client.spmd() and splits.PARTS in cut.leaf_places:
        return False  # each device's are others
    leaves = None
    if not on_this_host(cut.device):
        leaves = [
            transfer.download(location, shape, dtype)
            for location, (shape, dtype) in zip(cut.leaf_locations(), cut.leaf_metas, strict=True)
        ]
    try:
        with _timeline.span("operators", lambda: (cut.device, _bindings.user_frame())):
            cut.run_by_operator(functools.partial(_by_rule, cut), leaves)
    except CannotRun:
        return False
    return True


def on_this_host(device: int) -> bool:
    """Whether a device computes in this process's memory, as one."""
    place = placement.of(device)
    return place.platform == "cpu" and not place.mesh and not client.spmd()


def _by_rule(cut: _bindings.Graph, position: int, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Computes a node by its rule, as a program would."""
    parts, seed = cut.describe_node(position)
    node = graph.node(*parts)
    if sequence.is_collective(node) or node.op in (manual.ENTER, manual.LEAVE):
        raise CannotRun
    _metrics.count("OperatorsByRule")
    arrays = [transfer.put(to_numpy(tensor), cut.device) for tensor in tensors]
    numbers: list[Any] = [np.asarray(number.value, _NUMBERS[type(number.value)]) for number in node.numbers()]
    try:
        found = lowering.compute_alone(node, arrays, numbers, seed, on_this_host(cut.device))
    except lowering.LoweringError as error:
        error.nodes = lowering.alike(graph.describe(cut), node)
        raise
    return [
        None if meta is None or array is None else from_numpy(np.asarray(array), meta.dtype)
        for array, meta in zip(found, node.outs, strict=True)
    ]
