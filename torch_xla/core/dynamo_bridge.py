"""Has the functions that PyTorch's `torch.compile(backend="openxla")` calls.

A graph that Dynamo traced is recorded at each call, and the recorder finds the compiled program by its key. Recording
costs a few microseconds per operation, as no Python lies between them. A call is one program, except in training:
forward and backward passes and what follows are one program up to the next forward pass, a barrier or a read.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.execute import barrier as _barrier
from torch_xla._core.functions.calls import calls_of
from torch_xla._core.report import debug_level
from torch_xla._torch_internals import pytree


class _Part(Enum):
    """The part of a program that a traced graph is."""

    WHOLE = "whole"  # it gives values to the caller
    FORWARD = "forward"  # it gives values that a backward pass wants
    BACKWARD = "backward"  # it gives gradients
    UPDATE = "update"  # it only writes to its arguments


# For each device the node sequence at the end of the last backward pass.
_passed: dict[int | None, int] = {}


def extract_compiled_graph(xla_model: torch.fx.GraphModule, xla_args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """A graph of one node, which runs a traced graph as one program per call or as a part of a training step.

    Args:
        xla_model: The graph.
        xla_args: Arguments of the first call; what is returned takes others of their shapes.
    """
    del xla_args
    part = _part_of(xla_model)
    record = calls_of(xla_model)

    def optimized_mod(*args: Any) -> Any:  # callers look for this name
        xla_device = None if part is _Part.WHOLE or _bindings.is_eager() else _device_of(args)
        stays = xla_device is not None and (part is not _Part.UPDATE or _is_in_step(xla_device))
        if not stays:
            # What the arguments wait for is no part of this program, which has one graph only then.
            if any(_bindings.has_pending(device) for device in range(_bindings.device_count())):
                _barrier.evaluate(_tensors(args), cause=debug_level.DYNAMO_INPUTS)
        elif part is _Part.FORWARD and _is_in_step(xla_device):
            _barrier.sync(xla_device, cause=debug_level.DYNAMO)
        _bindings.suspend_eager(True)  # one program also where all else runs at once
        try:
            results = record(*args)
        finally:
            _bindings.suspend_eager(False)
        if not stays:
            _barrier.evaluate(_tensors(results), donates=True, cause=debug_level.DYNAMO)
        elif part is _Part.BACKWARD and xla_device is not None:
            _passed[xla_device] = _bindings.node_sequence()
        return results

    graph = torch.fx.Graph()
    inputs = [graph.placeholder(node.name) for node in xla_model.graph.nodes if node.op == "placeholder"]
    graph.output(graph.call_function(optimized_mod, tuple(inputs)))
    return torch.fx.GraphModule({}, graph)


def _is_in_step(device: int | None) -> bool:
    """Whether a backward pass is pending: what is recorded next belongs to its step, or begins another one."""
    if device is not None and device in _passed and _bindings.has_pending(device, _passed[device]):
        return True
    _passed.pop(device, None)
    return False


def _part_of(module: torch.fx.GraphModule) -> _Part:
    """By what AOTAutograd notes of the graph's outputs; a graph of another tracer has no notes."""
    from torch_xla._torch_internals import descriptors as d

    (output,) = (node for node in module.graph.nodes if node.op == "output")
    notes = [note for note in output.meta.get("desc") or () if note is not None]
    if any(isinstance(note, (d.SavedForBackwardsAOTOutput, d.SavedForBackwardsNoVcCheckAOTOutput)) for note in notes):
        return _Part.FORWARD
    if any(isinstance(note, d.GradAOTOutput) for note in notes):
        return _Part.BACKWARD
    if notes and all(isinstance(note, d.InputMutationAOTOutput) for note in notes):
        return _Part.UPDATE
    return _Part.WHOLE


def _device_of(values: tuple[Any, ...]) -> int | None:
    """Index of the first tensor's device: graphs of training steps are of one."""
    return next((x.device.index for x in values if isinstance(x, torch.Tensor) and x.device.type == "xla"), None)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    plain = all(x is None or isinstance(x, (torch.Tensor, int, float)) for x in values)
    flat = values if plain else pytree.tree_leaves(values)
    return [x for x in flat if isinstance(x, torch.Tensor) and x.device.type == "xla"]
