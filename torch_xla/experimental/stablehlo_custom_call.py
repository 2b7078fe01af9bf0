"""Custom calls, and two of them that say in which memory a tensor shall be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_xla._core.functions import custom_calls


def stablehlo_custom_call(
    args: Sequence[torch.Tensor],
    call_target: str,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[torch.dtype],
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    frontend_attributes: Mapping[str, str] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Calls what a backend, or whoever takes an exported module, knows under a name; it has no gradients.

    Args:
        args: Tensors on one XLA device, at least one.
        call_target: The name. Targets of one's own are registered with JAX, by `jax.ffi.register_ffi_target`.
        output_shapes: Shape of each result.
        output_dtypes: Dtype of each result.
        has_side_effect: Whether the call is kept although the program does not use its results.
        backend_config: What the target is told: any text; with `api_version` 4, a dictionary in MLIR's notation.
        api_version: Number of the calling convention in XLA, 0 to 4; 4 is that of `jax.ffi`.
        frontend_attributes: Names and values that XLA's passes may look for.

    Returns:
        The result, or a list if there are several.

    Raises:
        ValueError: There are no tensors or no results, not as many shapes as dtypes, or no such calling convention.
    """
    results = custom_calls.call(
        args,
        call_target,
        output_shapes,
        output_dtypes,
        has_side_effect,
        backend_config,
        api_version,
        frontend_attributes,
    )
    return results[0] if len(results) == 1 else results


def extract_custom_call_outputs_shape_dtype(
    n: torch.fx.Node,
) -> tuple[Sequence[torch.Size], Sequence[torch.dtype]]:
    """Shapes and dtypes of what a node of a traced graph gives; all of it must be tensors."""
    tensors = custom_calls.values_of(n)
    return [t.shape for t in tensors], [t.dtype for t in tensors]


def _placed(t: torch.Tensor, memory: str) -> torch.Tensor:
    (result,) = custom_calls.call(
        [t],
        "annotate_device_placement",
        [t.shape],
        [t.dtype],
        has_side_effect=True,
        frontend_attributes={"_xla_buffer_placement": memory},
    )
    return result


def _same_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


@torch.library.custom_op("xla::place_to_host", mutates_args=())
def place_to_host(t: torch.Tensor) -> torch.Tensor:
    """A tensor's values in the host's memory, where the compiler can move them there."""
    return _placed(t, "pinned_host")


@torch.library.custom_op("xla::place_to_device", mutates_args=())
def place_to_device(t: torch.Tensor) -> torch.Tensor:
    """A tensor's values in the device's memory."""
    return _placed(t, "device")


for _operator in (place_to_host, place_to_device):
    _operator.register_fake(torch.empty_like)
    _operator.register_autograd(_same_gradient)
