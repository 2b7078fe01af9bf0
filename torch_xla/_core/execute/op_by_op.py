"""Running a graph operator by operator with PyTorch's CPU kernels, without a program (`csrc/run/op_by_op`).

`hotness` says which graphs do until they are compiled. Others always do: a very small one behind a value that is read,
and small parts of a graph that would be compiled again and again because they grow, such as the tokens and positions of
`generate` (`Graph.divide`).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import torch

from torch_xla import _bindings, _config, _events, _metrics
from torch_xla._core.device import client, placement, shardings, transfer
from torch_xla._core.execute import value_check
from torch_xla._core.graph import graph, sequence
from torch_xla._core.lower import lowering, manual_lowering
from torch_xla.ops import dtypes
from torch_xla.ops.fallback import from_numpy, to_numpy
from torch_xla.ops.registry import StaticNumbers

_NUMBERS = {float: np.float64, int: np.int64, complex: np.complex128}


class CannotRun(Exception):
    """A graph has an operator that only a program computes."""


# What stands in the way of a run; the graph stays as it is.
Obstacle = CannotRun | StaticNumbers
CANNOT_RUN = CannotRun()


def on() -> bool:
    """Whether any graph runs so without need.

    CPU kernels compute 64-bit integers, and where algorithms are to be deterministic a graph has one way of running.
    """
    return _config.XLA_HOST_COMPUTE.get() and not (dtypes.shortens() or torch.are_deterministic_algorithms_enabled())


def divide(cut: _bindings.Graph, what: _bindings.Cut) -> list[_bindings.Cut]:
    """What to run before a new graph is cut again, so that no part of it is a new program; nothing where it is one.

    `what` is what it was made of.
    """
    parts = cut.partition_for_host(what) if on() else []
    if parts:
        _metrics.count("HostParts")
        if _events.sinks:
            _events.mark("host parts", _bindings.user_frame())
    return parts


def begin(cut: _bindings.Graph, request: Any) -> _bindings.OpByOpRun | None:
    """A run of a graph operator by operator, of which nothing is computed yet; None where only a program computes it.

    It is its device's until it is finished, which it must be before anything else is cut; the graph is empty then.
    Raises ExecutionError where an earlier program failed; this graph was not started.
    """
    if client.spmd() and shardings.PARTS in cut.leaf_placements:
        return None  # each device's are others
    running = prepare(cut)
    running.request = request
    _bindings.in_flight(cut.device).operator_run = running
    return running


def prepare(cut: _bindings.Graph) -> _bindings.OpByOpRun:
    """A run of a graph, of which nothing is computed yet."""
    leaves = None
    if not placement.of(cut.device).on_host:
        leaves = [
            transfer.download(location, shape, dtype)
            for location, (shape, dtype) in zip(cut.leaf_locations(), cut.leaf_metas, strict=True)
        ]
    return _bindings.OpByOpRun(cut, functools.partial(_by_rule, cut), leaves)


def run(cut: _bindings.Graph, request: Any) -> Obstacle | None:
    """Runs a graph operator by operator; gives what stands in the way, if anything does, else the graph is empty.

    Raises LoweringError, with the operator and the user's line, where one has neither a kernel that takes it nor a
    rule, and ExecutionError where an earlier program failed; this graph was not started.
    """
    with _events.span("operators", lambda: (cut.device, _bindings.user_frame())):
        running = begin(cut, request)
        return CANNOT_RUN if running is None else finish(running)


def finish(running: _bindings.OpByOpRun) -> Obstacle | None:
    """Finishes a run; gives what stands in the way, if anything does.

    An error says which node raised it, so that the others are not lost with that.
    """
    try:
        running.finish()
    except (CannotRun, StaticNumbers) as obstacle:
        _bindings.in_flight(running.graph.device).operator_run = None
        return obstacle.with_traceback(None)
    except Exception as error:
        if not (hasattr(error, "nodes") or running.interrupted):
            error.nodes = (running.position,)  # type: ignore[attr-defined]  # an attribute of our own
        raise
    return None


def _host() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to have none
        raise CannotRun from None


def _put(array: np.ndarray, device: int, host: jax.Device | None) -> jax.Array:
    if host is None:
        return transfer.put(array, device)
    with client.x64():
        return jax.device_put(array, host)


def _by_rule(cut: _bindings.Graph, position: int, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Computes a node by its rule, as a program would: its kernel does not take the call, or there is none."""
    node, seed = cut.describe_node(position, graph.CLASSES)
    if _config.XLA_CHECK_VALUES.get():
        value_check.check(_bindings.in_flight(cut.device).operator_run, node, tensors)
    if sequence.is_collective(node) or node.op in (manual_lowering.ENTER, manual_lowering.LEAVE):
        raise CannotRun
    _metrics.count("OperatorsByRule")
    place = placement.of(cut.device)
    # What the device's programs cannot call, JAX's own CPU client can: this is computed from host values anyway.
    host = None if client.has_callbacks() else _host()
    arrays = [_put(to_numpy(tensor), cut.device, host) for tensor in tensors]
    numbers: list[Any] = [np.asarray(number.value, _NUMBERS[type(number.value)]) for number in node.numbers()]
    try:
        with nullcontext() if host is None else jax.default_device(host):
            results = lowering.compute_alone(node, arrays, numbers, seed, None if host else place)
    except lowering.LoweringError as error:
        error.nodes = lowering.alike(graph.describe(cut), node)
        raise
    return [
        None if meta is None or array is None else from_numpy(np.asarray(array), meta.dtype)
        for array, meta in zip(results, node.outs, strict=True)
    ]
