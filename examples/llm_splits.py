"""How `train_llm.py --spmd` splits a Llama over the devices of one process: parameters, batch, what is in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

if __package__:
    from examples import common
else:
    import common

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = (DATA, FSDP)  # the axes that sequences are dealt out over
ROWS_BY_FSDP = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")  # of the others the columns


def axes_of(text: str) -> dict[str, int]:
    """The size of each axis of the mesh; what cannot be read ends the program.

    Args:
        text: Such as ``fsdp=4,tensor=2``.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or not int(size):
            common.refuse(f"got --spmd {text}, expected axes such as fsdp=4,tensor=2; there are {', '.join(AXES)}")
        sizes[name] = int(size)
    return sizes


def mesh_of(text: str) -> xs.Mesh:
    """The devices as a mesh; before the first tensor."""
    sizes = axes_of(text)
    count, there = math.prod(sizes.values()), xr.global_runtime_device_count()
    if count != there:
        common.refuse(f"got --spmd {text}, which is {count} devices, expected {there}; CPU_NUM_DEVICES says how many")
    xr.use_spmd()
    return xs.Mesh(np.arange(count), tuple(sizes.values()), AXES)


def share_of(mesh: xs.Mesh) -> int:
    """Over how many devices sequences are dealt out."""
    shape = mesh.shape()
    return shape[DATA] * shape[FSDP]


def split_model(model: nn.Module, mesh: xs.Mesh) -> None:
    """Splits the matrices of a Llama over axes ``fsdp`` and ``tensor``.

    A matrix that makes heads, or the gate's values, and the one that takes them are split alike in these over
    ``tensor``, so nothing is gathered in between. What goes from layer to layer is split by sequences.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            xs.mark_sharding(parameter, mesh, (FSDP, TENSOR) if name.endswith(ROWS_BY_FSDP) else (TENSOR, FSDP))

    def between(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        states = output if isinstance(output, torch.Tensor) else output[0]
        xs.mark_sharding(states, mesh, (ROWS, None, None))

    for layer in model.model.layers:
        layer.register_forward_hook(between)


def split_batch(tokens: Tensor, mesh: xs.Mesh) -> Tensor:
    """The batch, (sequences, length), its sequences dealt out."""
    xs.mark_sharding(tokens, mesh, (ROWS, None))
    return tokens
