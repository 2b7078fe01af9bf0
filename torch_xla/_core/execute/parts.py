"""Sets shardings of tensors, reads what each device has, and makes tensors of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import client, placement, shardings, transfer
from torch_xla._core.execute import barrier
from torch_xla._core.job import session
from torch_xla._errors import message


@dataclass(frozen=True)
class Part:
    """A shard of a tensor on a device."""

    device: int  # its index in the job
    where: tuple[slice, ...]  # slice of the full tensor; the last shard is shorter if sizes do not divide
    copy: int  # which of the equal parts this is
    values: torch.Tensor  # short ones are filled up with zeros


def place(tensor: torch.Tensor, number: int, recorded: bool = False) -> None:
    """Asks for a tensor to be in the place with a number, from now on.

    With `recorded` a value that is elsewhere is moved by the next program, and not at once.
    """
    if _bindings.set_placement(tensor, number, recorded):
        return
    with barrier.exclusive():
        location = barrier.location(tensor)
        values = transfer.download(location, tensor.shape, tensor.dtype)
        moved = transfer.upload(values, tensor.device.index, number)
        _bindings.replace_buffer(tensor, moved, number)


def use_mesh() -> bool:
    """Makes all devices of the job one xla device, and replicates the tensors that there are; whether there were any.

    Raises RuntimeError where they are on others than the first device, or the job has other processes.
    """
    with barrier.exclusive():
        holders = [index for index in range(_bindings.device_count()) if _bindings.live_tensors(index)]
        if client.spmd() or not holders:
            client.use_spmd()
            return False
        if holders != [0] or session.rank_info().world > 1:
            raise RuntimeError(
                message(
                    "spmd",
                    f"got tensors on {', '.join(f'xla:{index}' for index in holders)} before SPMD mode",
                    expected="none, or those of xla:0 in a job of one process",
                    do="call torch_xla.runtime.use_spmd() before the first xla tensor",
                )
            )
        barrier.sync(0, wait=True)
        tensors = _bindings.bases_on(0)
        values = [transfer.download(barrier.location(t), t.shape, t.dtype) for t in tensors]
        client.use_spmd()
        for tensor, value in zip(tensors, values, strict=True):
            _bindings.replace_buffer(tensor, transfer.upload(value, 0), shardings.REPLICATED)
        return True


def number_of(tensor: torch.Tensor) -> int:
    """The placement number of a tensor, or the one it is to have."""
    number: int = _bindings.placement_of(tensor)
    return number


def of_tensor(tensor: torch.Tensor) -> list[Part]:
    """Computes a tensor and returns its shards on the devices of this process."""
    (buffer,) = barrier.buffers([tensor])
    place = placement.of(tensor.device.index)
    target_split = shardings.by_number(number_of(tensor)) or shardings.tile_assignment(
        [1] * tensor.dim(), range(len(place.devices))
    )
    shape = tuple(tensor.shape)
    local = {place.devices.index(device): device for device in place.local}
    transfer.finish_to_read(buffer)
    here = {shard.device: shard.data for shard in buffer.addressable_shards}
    full_tensor = None if target_split.fits(shape) else transfer.download((buffer, -1), shape, tensor.dtype)
    parts = []
    for device, where, copy in target_split.indices(shape):
        if device not in local:
            continue
        if full_tensor is None:
            values = transfer.read((here[local[device]], -1), shape, tensor.dtype)
        else:
            values = _padded(full_tensor[where], [-(-n // t) for n, t in zip(shape, target_split.tiles, strict=True)])
        parts.append(Part(device, where, copy, values))
    return parts


def _padded(values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    full = torch.zeros(tuple(shape), dtype=values.dtype)
    full[tuple(slice(0, n) for n in values.shape)] = values
    return full


def buffer_of(
    parts: Sequence[torch.Tensor], sharding: shardings.TileAssignment | None, shape: Sequence[int], index: int
) -> Any:
    """A device buffer of the parts, CPU tensors of equal shape, for the devices of this process, in their order.

    `sharding` is how the whole, of a shape beyond which the last parts are dropped, is split; None where each has all.
    """
    place = placement.of(index)
    number = shardings.REPLICATED if sharding is None else shardings.number_of(sharding)
    if sharding is None or sharding.fits(shape):
        return transfer.put_parts([transfer.own_values(part) for part in parts], shape, index, number)
    full_tensor = torch.zeros(tuple(shape), dtype=parts[0].dtype)
    local = [place.devices.index(device) for device in place.local]
    for device, where, _ in sharding.indices(shape):
        full_tensor[where] = parts[local.index(device)][tuple(slice(0, s.stop - s.start) for s in where)]
    return transfer.upload(full_tensor, index, number)
