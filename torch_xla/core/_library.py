"""Operators of namespace ``xla`` that programs for `torch.compile` call by name."""

from __future__ import annotations

import ast

import torch

from torch_xla._core.graph.library import XLA_LIB as XLA_LIB
from torch_xla.core import _donation


def _mark_sharding(
    input: torch.Tensor, device_ids: list[int], mesh_shape: list[int], axis_names: str, partition_spec: str
) -> torch.Tensor:
    """`mark_sharding` with its arguments as lists and text; tensors of other devices pass unchanged.

    What `torch.compile` traces is no tensor yet: there the arguments are checked, and XLA chooses the split.
    """
    if input.device.type == "xla":
        import torch_xla.distributed.spmd as xs

        mesh = xs.Mesh(device_ids, tuple(mesh_shape), ast.literal_eval(axis_names))
        spec = ast.literal_eval(partition_spec)
        if type(input) in (torch.Tensor, torch.nn.Parameter, xs.XLAShardedTensor):
            xs.mark_sharding(input, mesh, spec)
        else:
            mesh.get_op_sharding(spec)
    return input


def _set_buffer_donor(t: torch.Tensor, should_donoate: bool) -> torch.Tensor:
    """Gives a tensor's buffer away, or takes that back.

    What `torch.compile` traces has no buffer: there it does nothing, and the buffer of an input that the graph writes
    to is given at the barrier, as always.
    """
    if t.device.type == "xla" and type(t) in (torch.Tensor, torch.nn.Parameter):
        _donation.give(t, should_donoate)
    return t


XLA_LIB.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec)"
    " -> Tensor"
)
XLA_LIB.define("dynamo_set_buffer_donor_(Tensor t, bool should_donoate) -> Tensor")  # spelled so
# Nothing of them stays in a graph.
XLA_LIB.impl("dynamo_mark_sharding", _mark_sharding, "CompositeImplicitAutograd")
XLA_LIB.impl("dynamo_set_buffer_donor_", _set_buffer_donor, "CompositeImplicitAutograd")
