"""Runs a graph op by op with PyTorch's CPU kernels, without a program (`csrc/run/op_by_op`).

`x.sum() * 2` becomes two kernels instead of a compile. `hotness` says which graphs run so until they are compiled.
Others always do: a very small graph behind a read, and small parts that would be compiled again and again because they
grow, such as the tokens and positions of `generate` (`Graph.partition_for_host`).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext, suppress
from typing import Any

import jax
import numpy as np
import torch

from torch_xla import _bindings, _config, _events, _metrics
from torch_xla._core.device import client, placement, shardings, transfer
from torch_xla._core.execute import executor, host_collective, value_check
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import CLASSES, describe, fill_template
from torch_xla._core.job import agreement, session
from torch_xla._core.lower import lowering, manual_lowering
from torch_xla._errors import ExecutionError, GraphFailure, message
from torch_xla._torch_internals import has_computed_kernel
from torch_xla.ops import dtypes
from torch_xla.ops.call import find_overload
from torch_xla.ops.fallback import from_numpy, to_numpy
from torch_xla.ops.registry import StaticNumbers

_NUMBERS = {float: np.float64, int: np.int64, complex: np.complex128}


class CannotRun(Exception):
    """A graph has an operator that only a program computes."""


def on() -> bool:
    """Whether graphs run op by op that could be compiled.

    CPU kernels compute 64-bit integers, and where algorithms are to be deterministic a graph has one way of running.
    """
    allowed = _config.XLA_HOST_COMPUTE.get() != "never"
    return allowed and not (dtypes.shortens() or torch.are_deterministic_algorithms_enabled())


def partition_for_host(graph: _bindings.Graph, cut: _bindings.Cut) -> list[_bindings.Cut]:
    """The cuts to run before a new graph is cut again, so that no growing part is compiled; none if it is.

    `cut` is the one that the graph was made by.
    """
    parts = graph.partition_for_host(cut) if on() else []
    if parts:
        _metrics.count("HostParts")
        if _events.sinks:
            _events.mark("host parts", _bindings.user_frame())
    return parts


def begin(graph: _bindings.Graph, request: Any) -> _bindings.OpByOpRun | None:
    """Prepares an op-by-op run of a graph; None where only a program can compute it.

    The run belongs to its device until it is finished, before anything else is cut; the graph is empty then.
    Raises ExecutionError where an earlier program failed; this graph was not started. Raises StaleGraph where something
    computed it meanwhile, as the run itself does.
    """
    if client.spmd() and shardings.MANUAL in graph.leaf_placements:
        return None  # each device's are others
    running = prepare(graph)
    if graph.has_collectives and not running.has_kernels:
        return None  # should it come to an obstacle, the program would repeat those before that
    running.request = request
    _bindings.in_flight(graph.device).operator_run = running
    return running


def prepare(graph: _bindings.Graph) -> _bindings.OpByOpRun:
    """An op-by-op run of a graph, not started. Raises GraphFailure where there is no room for what it is to fill."""
    leaves = None
    try:
        if not placement.of(graph.device).on_host:
            leaves = [
                transfer.download(location, shape, dtype)
                for location, (shape, dtype) in zip(graph.leaf_locations(), graph.leaf_metas, strict=True)
            ]
        return _bindings.OpByOpRun(graph, functools.partial(_by_rule, graph), leaves, _collectives(graph))
    except torch.OutOfMemoryError as error:
        if graph.unfilled:
            raise GraphFailure(error) from None
        raise


def _collectives(graph: _bindings.Graph) -> dict[int, host_collective.Parts]:
    """Prepares a graph's collectives; everything that was started before has then run.

    A program that waits in one for a kernel would wait for ever: kernels run in one thread.
    """
    if not graph.has_collectives:
        return {}
    described = describe(graph)
    agreement.prepare(described)
    for device in range(_bindings.device_count()):
        executor.wait(device)
    return host_collective.of_graph(described, session.rank_info().rank)


def run(graph: _bindings.Graph, request: Any) -> bool:
    """Runs a graph op by op; False where only a program can compute it, else the graph is empty.

    Raises StaticNumbers where a rule needs constants, GraphFailure with the node that has neither a kernel that takes
    it nor a rule, and ExecutionError where an earlier program failed; this graph was not started.
    """
    with _events.span("operators", lambda: (graph.device, _bindings.user_frame())):
        running = begin(graph, request)
        return running is not None and finish(running)


def finish(running: _bindings.OpByOpRun) -> bool:
    """Finishes a run; as `run`."""
    try:
        running.finish()
    except (CannotRun, StaticNumbers) as obstacle:
        _bindings.in_flight(running.graph.device).operator_run = None
        graph = running.graph
        if graph.has_collectives and any(map(sequence.is_collective, describe(graph).nodes[: running.position])):
            problem = f"node {running.position} of a graph has no kernel, behind a collective that has run ({obstacle})"
            failure = RuntimeError(message("run", problem, do="set XLA_HOST_COMPUTE=reads, in all processes"))
            raise GraphFailure(failure, (running.position,)) from None
        if isinstance(obstacle, StaticNumbers):
            raise
        return False
    except (GraphFailure, ExecutionError, _bindings.StaleGraph):
        raise
    except Exception as error:
        if running.interrupted:
            raise
        raise GraphFailure(error, (running.position,)) from None
    return True


def _host() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to have none
        raise CannotRun from None


def _by_rule(graph: _bindings.Graph, position: int, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Computes a node by its rule, as a program would: its kernel does not take the call, or there is none."""
    node, seed = graph.describe_node(position, CLASSES)
    if _config.XLA_CHECK_VALUES.get():
        value_check.check(_bindings.in_flight(graph.device).operator_run, node, tensors)
    if node.op in (manual_lowering.ENTER, manual_lowering.LEAVE):
        raise CannotRun
    op = find_overload(node.op)
    if op.namespace == "xla" and seed is None and has_computed_kernel(op.name(), "CPU"):  # in Python, none in csrc/run
        with suppress(IndexError, RuntimeError):  # a refused call is the rule's, as where a kernel of PyTorch's refuses
            results = op(*fill_template(node, tensors, lambda number: number.value))
            return [results] if isinstance(results, torch.Tensor) else list(results)
    _metrics.count("OperatorsByRule")
    # What the device's programs cannot call, JAX's own CPU client can: this is computed from host values anyway.
    host = None if client.has_callbacks() else _host()
    if host is None:
        arrays = [transfer.put(to_numpy(tensor), graph.device) for tensor in tensors]
    else:
        with client.x64():
            arrays = [jax.device_put(to_numpy(tensor), host) for tensor in tensors]
    numbers: list[Any] = [np.asarray(number.value, _NUMBERS[type(number.value)]) for number in node.numbers()]
    try:
        with nullcontext() if host is None else jax.default_device(host):
            results = lowering.compute_alone(node, arrays, numbers, seed, None if host else placement.of(graph.device))
    except lowering.LoweringError as error:
        raise GraphFailure(error, lowering.like_nodes(describe(graph), node)) from None
    return [
        None if meta is None or array is None else from_numpy(np.asarray(array), meta.dtype)
        for array, meta in zip(results, node.outs, strict=True)
    ]
