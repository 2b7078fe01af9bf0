"""Changes to modules that are trained with FSDP."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from torch_xla.distributed.spmd.xla_sharding import XLAPatchedLinear as XLAPatchedLinear
from torch_xla.distributed.spmd.xla_sharding import xla_patched_nn_linear_forward
from torch_xla.utils.checkpoint import checkpoint

# Where a module with checkpointing keeps its own forward pass.
INNER_FORWARD = "_xla_checkpointed_forward_original"


def _checkpointed_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner = getattr(module, INNER_FORWARD)
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    # All of it runs again, what hooks and step closures do included; what nobody needs of that is never computed.
    with set_checkpoint_early_stop(False):
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def checkpoint_module(module: torch.nn.Module) -> torch.nn.Module:
    """Makes a module compute its inner values again in the backward pass instead of keeping them.

    Args:
        module: The module; its ``forward`` is replaced.
    """
    # Bound to the module, so that a deep copy of it calls its own.
    setattr(module, INNER_FORWARD, module.forward)
    module.forward = MethodType(_checkpointed_forward, module)
    return module


def apply_xla_patch_to_nn_linear(
    module: torch.nn.Module,
    patched_function: Callable[[torch.nn.Linear, torch.Tensor], torch.Tensor] = xla_patched_nn_linear_forward,
) -> torch.nn.Module:
    """Replaces the forward pass of the linear layers inside a module.

    Args:
        module: The module; changed in place. A layer whose forward pass is not PyTorch's is left alone.
        patched_function: Called with the layer and its input.
    """
    for layer in module.modules():
        for name in ("forward", INNER_FORWARD) if isinstance(layer, torch.nn.Linear) else ():
            if getattr(getattr(layer, name, None), "__func__", None) is torch.nn.Linear.forward:
                setattr(layer, name, MethodType(patched_function, layer))
    return module
