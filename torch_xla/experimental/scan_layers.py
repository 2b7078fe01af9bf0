"""Equal layers one after the other as one loop over their stacked parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla._torch_internals import default_partition
from torch_xla.experimental.scan import scan

_ONE_LAYER_CACHE: weakref.WeakKeyDictionary[torch.nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_layer_pure: bool = False,
) -> Any:
    """``torch.nn.Sequential(*layers)(input_data)`` with one layer in the program instead of all.

    Args:
        layers: Modules of one structure that compute the same with their own parameters and buffers; they write to none
            of them.
        input_data: Input of the first; each layer returns tensors of its input's structure, shapes and dtypes.
        partition_fn: As for `scan`.
        is_layer_pure: Whether the first layer is traced once per signature, and not at every call.

    Returns:
        The output of the last layer; `input_data` if there are none.

    Raises:
        ValueError: The layers differ in the names or shapes of their parameters or buffers.
    """
    modules = list(layers)
    if not modules:
        return input_data
    parameters: list[dict[str, torch.Tensor]] = [dict(module.named_parameters()) for module in modules]
    buffers: list[dict[str, torch.Tensor]] = [dict(module.named_buffers()) for module in modules]
    for tensors in (parameters, buffers):
        _check(tensors)
    if not parameters[0] and not buffers[0]:
        for module in modules:  # nothing to slice
            input_data = module(input_data)
        return input_data
    stacked = tuple(
        {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]} for each in (parameters, buffers)
    )
    first = modules[0]
    function = _ONE_LAYER_CACHE.get(first) if is_layer_pure else None
    if function is None:
        function = _layer_function(first)
        if is_layer_pure:
            _ONE_LAYER_CACHE[first] = function
    return scan(function, input_data, stacked, partition_fn, is_layer_pure)[0]


def _layer_function(layer: torch.nn.Module) -> Callable[..., Any]:
    # A template of its own: the function must not keep the layer, which is the key it is kept under.
    template = copy.deepcopy(layer)

    def call(carry: Any, state: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]) -> tuple[Any, None]:
        return torch.func.functional_call(template, state, carry, strict=True), None

    return call


def _check(dicts: list[dict[str, torch.Tensor]]) -> None:
    for number, tensors in enumerate(dicts):
        if tensors.keys() != dicts[0].keys():
            got = f"Layer {number} has mismatched keys: {sorted(tensors.keys() ^ dicts[0].keys())}"
            raise ValueError(message("scan_layers", got, expected="layers of one structure"))
        for name, tensor in tensors.items():
            if tensor.shape != dicts[0][name].shape:
                got = f"Shape mismatch for '{name}' in layer {number}: {tuple(tensor.shape)}"
                raise ValueError(message("scan_layers", got, expected=str(tuple(dicts[0][name].shape))))
