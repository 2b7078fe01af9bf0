"""Operators with neither rule nor decomposition: PyTorch's CPU kernel, called from inside the compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Lifted, Meta


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as a NumPy array of the XLA dtype; shares memory where it can."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    target = dtypes.numpy_dtype(tensor.dtype)
    if target.kind == "V" or tensor.dtype in (torch.bfloat16,):
        width = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(width).numpy().view(target)
    return tensor.numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor with a copy of the array's values."""
    array = np.array(array, order="C", copy=True)
    if array.dtype.kind == "V" or dtype == torch.bfloat16:
        width = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(array.view(width)).view(dtype)
    return torch.from_numpy(array)


def run(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Meta | None]
) -> tuple[Any, ...]:
    """Places a host callback into the program.

    Args:
        op: Operator whose CPU kernel computes the results.
        args: Positional arguments with arrays for tensors.
        kwargs: Keyword arguments, likewise.
        out: Promised results.

    Returns:
        One array per promised result, None where undefined.
    """
    arrays: list[jax.Array] = []

    class Slot(int):
        kind: type | None = None

    def freeze(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(freeze(e) for e in x)
        if isinstance(x, (jax.Array, Lifted)):
            slot = Slot(len(arrays))
            slot.kind = x.kind if isinstance(x, Lifted) else None
            arrays.append(x.value if isinstance(x, Lifted) else x)
            return slot
        return x

    template = freeze(list(args)), {k: freeze(v) for k, v in kwargs.items()}
    metas = [m for m in out if m is not None]
    shapes = [jax.ShapeDtypeStruct(m.shape, dtypes.numpy_dtype(m.dtype)) for m in metas]

    def host(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        def thaw(x: Any) -> Any:
            if isinstance(x, Slot):
                value = np.asarray(values[x])
                tensor = from_numpy(value, dtypes.torch_dtype(value.dtype))
                return tensor if x.kind is None else x.kind(tensor.item())
            if isinstance(x, (list, tuple)):
                return type(x)(thaw(e) for e in x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        with torch.no_grad():
            results = op(*thaw(template[0]), **{k: thaw(v) for k, v in template[1].items()})
        flat = results if isinstance(results, (tuple, list)) else (results,)
        flat = [r for r in flat if isinstance(r, torch.Tensor)]
        return tuple(to_numpy(r.to(m.dtype).expand(m.shape)) for r, m in zip(flat, metas, strict=True))

    values = iter(jax.pure_callback(host, tuple(shapes), *arrays, vmap_method="sequential"))
    return tuple(None if m is None else next(values) for m in out)
