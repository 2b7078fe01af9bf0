"""Moving the tensors inside nested containers to a device, or to the CPU for saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.execute import barrier as _barrier
from torch_xla.utils import utils as xu


class ToXlaTensorArena:
    """Replaces tensors inside nested containers, all in one conversion.

    Args:
        convert_fn: Takes the list of selected tensors, gives their replacements.
        select_fn: Says which objects are meant.
    """

    def __init__(self, convert_fn: Callable[[list[Any]], list[Any]], select_fn: Callable[[Any], bool]) -> None:
        self._convert_fn = convert_fn
        self._select_fn = select_fn

    def transform(self, inputs: Any) -> Any:
        """A copy of the nesting with replacements; ``inputs`` itself if nothing in it is selected."""
        selected: list[Any] = []
        xu.for_each_instance(inputs, self._select_fn, selected.append)
        if not selected:
            return inputs
        # By order, not identity: a `DataWrapper` may make its tensors anew each time.
        converted = iter(self._convert_fn(selected))
        return xu.for_each_instance_rewrite(inputs, self._select_fn, lambda _: next(converted))


def _to_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """CPU copies; tensors that are aliases of one another share theirs, as ``torch.save`` then does too."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    result = []
    for tensor in tensors:
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        key = (_bindings.tensor_id(tensor), *layout)
        if key not in copies:
            copies[key] = tensor.detach().cpu()
        copy = copies[key]
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        result.append(copy)
    return result


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:
    """Replaces XLA tensors in nested containers by CPU copies.

    Args:
        data: Any nesting of containers; not changed.
        convert: If False, the tensors are computed and ``data`` comes back as it is.
    """

    def convert_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        _barrier.evaluate(tensors, wait=False)
        return _to_cpu(tensors) if convert else tensors

    arena = ToXlaTensorArena(convert_all, lambda item: isinstance(item, torch.Tensor) and item.device.type == "xla")
    return arena.transform(data)


def send_cpu_data_to_device(datas: Any, device: str | torch.device, input_sharding: Any = None) -> Any:
    """Replaces CPU tensors in nested containers by copies on a device.

    Args:
        datas: Any nesting of containers, not changed. A lone tensor counts as a list of one.
        device: The device.
        input_sharding: A `torch_xla.distributed.spmd.ShardingSpec` for those of the tensors that it fits.

    Returns:
        The same nesting with tensors on the device.
    """
    target = torch.device(device)
    if isinstance(datas, torch.Tensor):
        datas = [datas]

    def send(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            copies = [
                torch.nn.Parameter(sent, requires_grad=tensor.requires_grad)
                if isinstance(tensor, torch.nn.Parameter)
                else sent.requires_grad_(tensor.requires_grad)
                for tensor, sent in ((tensor, to_device(tensor)) for tensor in tensors)
            ]
        return copies

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        if input_sharding is not None and input_sharding.can_apply(tensor):
            split: torch.Tensor = input_sharding.send(tensor, target)
            return split
        sent = tensor.to(target)
        if input_sharding is not None:
            _bindings.buffer_of(sent.detach())  # now, and not when a program takes it
        return sent

    arena = ToXlaTensorArena(send, lambda item: isinstance(item, torch.Tensor) and item.device.type == "cpu")
    return arena.transform(datas)
