"""`DeviceMesh` and `DTensor` for device type ``xla`` in a job of processes.

PyTorch leaves device type ``xla`` to SPMD: such a mesh gets no process groups, and `distribute_tensor` asks this
package. There is nothing to register for that, so `DeviceMesh` is changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_xla import runtime
from torch_xla._core.job import session
from torch_xla._core.torch import default_accelerator
from torch_xla.distributed import _default_device, _sharding_rules


class _LikeAnyOther(str):
    """The name ``xla`` while a mesh is made: PyTorch compares it in order to leave the groups out."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = str.__hash__


def has_groups() -> bool:
    """Whether device meshes are made of processes, each with its device; else they are SPMD's."""
    is_distributed = dist.is_initialized() or default_accelerator.on()
    return not runtime.is_spmd() and (is_distributed or session.rank_info().world > 1)


def _take_fake_groups() -> None:
    """Lists xla among the devices of groups that do nothing, which dimensions of one process may be given."""
    devices = dist.Backend.backend_capability.get("fake", ["xla"])
    if "xla" not in devices:
        devices.append("xla")


def install() -> None:
    """Gives meshes of device type ``xla`` process groups; does nothing the second time."""
    make = DeviceMesh.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_with_groups(self: DeviceMesh, device_type: str, *args: Any, **options: Any) -> None:
        _default_device.check_mesh(device_type)
        ours = device_type == "xla" and has_groups()
        if ours:
            _take_fake_groups()
            if not dist.is_initialized():
                dist.init_process_group("xla")  # PyTorch would make the group of its accelerator
        make(self, _LikeAnyOther(device_type) if ours else device_type, *args, **options)
        if ours:
            self._device_type = "xla"
            _sharding_rules.install()

    DeviceMesh.__init__ = make_with_groups  # type: ignore[method-assign]


def distribute_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any] | None, source: int | None = 0
) -> torch.Tensor:
    """Does for xla what `torch.distributed.tensor.distribute_tensor` does for other devices.

    Placements are one per dimension of the mesh, replicated by default; `source` is the place along each dimension of
    whoever has the values; with None each process has them.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    chosen = [Replicate() for _ in range(mesh.ndim)] if placements is None else list(placements)
    if not tensor.is_leaf:
        raise RuntimeError("`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf tensor!")
    if len(chosen) != mesh.ndim:
        raise ValueError(
            f"`placements` must have the same length as `device_mesh.ndim`! "
            f"Found placements length: {len(chosen)}, and device_mesh.ndim: {mesh.ndim}."
        )
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh or tensor.placements != tuple(chosen):
            raise ValueError(
                f"Cannot distribute a DTensor with device mesh {tensor.device_mesh} and placements {tensor.placements} "
                f"to device mesh {mesh} and placements {chosen}. do you want to call `redistribute` instead?"
            )
        return tensor
    local = tensor.detach() if tensor.is_meta else tensor.detach().to("xla")
    if mesh.get_coordinate() is not None and source is not None and not local.is_meta:
        local = local.clone(memory_format=torch.contiguous_format)
        for dim in range(mesh.ndim):
            dist.broadcast(local, group=mesh.get_group(dim), group_src=source)
    replicated = [Replicate() for _ in chosen]
    split = [Replicate() if isinstance(p, Partial) else p for p in chosen]
    with torch.no_grad():
        sharded = DTensor.from_local(local, mesh, replicated, run_check=False).redistribute(mesh, split)
        part = sharded.to_local()
        for dim, placement in enumerate(chosen):
            if isinstance(placement, Partial) and mesh.get_coordinate() is not None:
                part = placement._partition_value(part, mesh, dim)
    result = DTensor.from_local(
        part.contiguous(), mesh, chosen, run_check=False, shape=tensor.shape, stride=_strides(tensor.shape)
    )
    return result.detach().requires_grad_(tensor.requires_grad)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def distribute_module(
    module: nn.Module,
    mesh: DeviceMesh,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None,
) -> nn.Module:
    """Does for xla what `torch.distributed.tensor.distribute_module` does, with its parameters."""
    from torch.distributed.tensor import DTensor

    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        for key, param in submodule._parameters.items():
            if param is not None and not isinstance(param, DTensor):
                replicated = distribute_tensor(param.detach(), mesh, None)
                submodule.register_parameter(key, nn.Parameter(replicated, param.requires_grad))
        for key, buffer in submodule._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                submodule._buffers[key] = distribute_tensor(buffer, mesh, None)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: output_fn(mod, outputs, mesh))
    return module


def source_of_caller() -> int | None:
    """The ``src_data_rank`` that `distribute_tensor` of PyTorch was given."""
    # It passes it to nobody, and cannot be replaced for who has imported it by name: only its frame has it.
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "distribute_tensor":
        frame = frame.f_back
    return frame.f_locals.get("src_data_rank", 0) if frame is not None else 0
