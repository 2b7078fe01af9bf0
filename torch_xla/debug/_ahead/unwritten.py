"""Keeps a script from writing the values of described devices into files, where they would be zeros over true ones."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import client


def keep(counts: dict[str, int]) -> None:
    """Makes the functions that save tensors do nothing from now on, once there are described tensors; counts calls.

    PyTorch and safetensors have no registration for it.
    """

    def replaced(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def save(*args: Any, **kwargs: Any) -> Any:
            in_memory = isinstance(kwargs.get("f", args[1] if len(args) > 1 else None), io.BytesIO)
            if in_memory or not client.client_started():
                return function(*args, **kwargs)
            what = f"{name} at {_bindings.user_frame() or 'an unknown line'}"
            counts[what] = counts.get(what, 0) + 1
            return None

        return save

    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    torch.save = replaced(torch.save, "torch.save")
    checkpoint.save = replaced(checkpoint.save, "torch.distributed.checkpoint.save")
    checkpoint.async_save = replaced(checkpoint.async_save, "torch.distributed.checkpoint.async_save")
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors

        # What `safetensors.torch.save_file` calls, which others have under names of their own.
        write = replaced(safetensors.serialize_file, "safetensors")
        safetensors.serialize_file = write
        if (loaded := sys.modules.get("safetensors.torch")) is not None:
            loaded.serialize_file = write  # type: ignore[attr-defined]
