"""Types: PyTorch's dtypes in JAX, and PyTorch's promotion rules over JAX arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import lax

from torch_xla import _config
from torch_xla.ops.call_settings import default_dtype
from torch_xla.ops.registry import NumberInput
from torch_xla.ops.xla_types import XLA_NAMES

_TO_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_FROM_NUMPY = {numpy_dtype: dtype for dtype, numpy_dtype in _TO_NUMPY.items()}
_SHORTENED = {torch.int64: torch.int32, torch.uint64: torch.uint32}
_LENGTHENED = {np.dtype(np.int32): torch.int64, np.dtype(np.uint32): torch.uint64}
_OPMATH = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

Number = bool | int | float | complex | NumberInput


@functools.cache
def shortens() -> bool:
    """Whether devices keep integers of 64 bits in 32; it stays as it is for the process, whose buffers depend on it."""
    return _config.XLA_USE_32BIT_LONG.get()


def _device_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that devices keep values of `dtype` in."""
    return _SHORTENED[dtype] if dtype in _SHORTENED and shortens() else dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy (and JAX) dtype of a PyTorch dtype; TypeError where XLA has none (quantized and complex32 tensors)."""
    try:
        return _TO_NUMPY[_device_dtype(dtype)]
    except KeyError:
        raise TypeError(f"[dtype] {dtype} has no XLA type; convert the tensor first, e.g. .to(torch.float32)") from None


def limits(dtype: np.dtype) -> tuple[int, int]:
    """The least and the greatest number of an integer type. One that is kept shorter takes the nearest it can hold."""
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def xla_name(dtype: torch.dtype) -> str:
    """XLA's name of a dtype, such as ``"bf16"``."""
    dtype = _device_dtype(dtype)
    return XLA_NAMES.get(dtype) or str(dtype).removeprefix("torch.").replace("float8_", "f8")


def torch_dtype(dtype: Any) -> torch.dtype:
    """The PyTorch dtype of a NumPy or JAX dtype; the wider one where both are kept alike."""
    dtype = np.dtype(dtype)
    return _LENGTHENED[dtype] if dtype in _LENGTHENED and shortens() else _FROM_NUMPY[dtype]


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number, constant or lifted."""
    return isinstance(x, (bool, int, float, complex, NumberInput))


def cast(x: jax.Array | Number, dtype: torch.dtype) -> jax.Array:
    """`x` as an array of PyTorch type `dtype`, with PyTorch's conversion (complex drops its imaginary part)."""
    target = numpy_dtype(dtype)
    array: Any = x.value if isinstance(x, NumberInput) else x
    if is_number(x) and _device_dtype(dtype) != dtype:
        array = jnp.clip(array, *limits(target)) if isinstance(x, NumberInput) else np.clip(array, *limits(target))
    if not hasattr(array, "dtype"):
        # NumPy wraps a Python number that the type cannot hold, as PyTorch does; JAX would raise.
        with np.errstate(all="ignore"):
            return jnp.asarray(_real(np.asarray(array), target).astype(target))
    if array.dtype == target:
        return array
    array = _real(array, target)
    narrow = jnp.issubdtype(target, jnp.unsignedinteger) or target.itemsize < 4
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(target, jnp.integer) and narrow:
        # XLA saturates; PyTorch's CPU kernels wrap through a wide signed integer.
        array = array.astype(np.int64)
    if dtype == torch.float8_e4m3fn and _saturates():
        array = jnp.clip(array, *(sign * float(ml_dtypes.finfo(target).max) for sign in (-1, 1)))
    return array.astype(target)


@functools.cache
def _saturates() -> bool:
    """Whether this PyTorch makes the largest float8_e4m3fn of what is larger; XLA and older ones make NaN."""
    return torch.tensor(1e30).to(torch.float8_e4m3fn).item() == 448


def _real(x: Any, target: np.dtype) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating):
        return x.real if target != np.bool_ else x != 0
    return x


def number_dtypes(default: torch.dtype) -> dict[type, torch.dtype]:
    """The dtype of each type of Python numbers, for a default dtype."""
    return {
        bool: torch.bool,
        int: torch.int64,
        float: default,
        complex: torch.promote_types(default, torch.complex64),
    }


def result_type(*operands: Any) -> torch.dtype:
    """PyTorch's promoted dtype of arrays and numbers; None operands are ignored.

    See https://pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc.
    """
    kinds: dict[str, torch.dtype] = {}

    def merge(slot: str, dtype: torch.dtype) -> None:
        kinds[slot] = torch.promote_types(kinds.get(slot, dtype), dtype)

    types = number_dtypes(default_dtype())
    for x in operands:
        if x is None:
            continue
        if is_number(x):
            merge("numbers", types[x.kind if isinstance(x, NumberInput) else type(x)])
        else:
            merge("dims" if x.ndim else "scalars", torch_dtype(x.dtype))
    result: torch.dtype | None = None
    for slot in ("dims", "scalars", "numbers"):
        lower = kinds.get(slot)
        if lower is None:
            continue
        if result is None:
            result = lower
        elif _category(lower) > _category(result):
            if _category(lower) == 3 and result.is_floating_point:
                lower = {torch.float64: torch.complex128}.get(result, torch.complex64)
            result = torch.promote_types(result, lower) if _category(lower) == 3 else lower
    assert result is not None, "result_type of no operands"
    return result


def _category(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The type PyTorch computes in for values of `dtype`: float32 for the half types, else `dtype`."""
    return _OPMATH.get(dtype, dtype)


def to_float(dtype: torch.dtype) -> torch.dtype:
    """The floating type of an operator that promotes integers to the default float type (`sin`, `mean`, …)."""
    return dtype if dtype.is_floating_point or dtype.is_complex else default_dtype()


def dtype_of(x: jax.Array) -> torch.dtype:
    """The PyTorch dtype of an array."""
    return torch_dtype(x.dtype)


def compute_type(*operands: Any, floating: bool = False) -> torch.dtype:
    """The type an elementwise operator computes in: the promoted one of its operands, float32 for the half types.

    With `floating` integers become the default float type; None among the operands is ignored.
    """
    dtype = result_type(*operands)
    return opmath(to_float(dtype) if floating else dtype)


def promote(*operands: Any, floating: bool = False) -> list[jax.Array]:
    """Operands of an elementwise operator, in their `compute_type` and broadcast to one shape.

    What has another type than the promoted one is rounded to that first, as PyTorch's kernels read it.
    """
    dtype = result_type(*operands)
    dtype = to_float(dtype) if floating else dtype
    return broadcast(*(rounded(x, dtype) for x in operands), dtype=opmath(dtype))


def convert(*operands: Any, floating: bool = False) -> list[jax.Array]:
    """As `promote`, each operand in its own shape; numbers, and arrays of one element, are not rounded."""
    dtype = result_type(*operands)
    dtype = to_float(dtype) if floating else dtype
    return [cast(x if is_number(x) or x.size == 1 else rounded(x, dtype), opmath(dtype)) for x in operands]


def rounded(x: Any, dtype: torch.dtype) -> Any:
    """The values that `x` has in a half type, in the type that is computed in; of other types, `x` itself."""
    wide = opmath(dtype)
    if wide == dtype or (not is_number(x) and dtype_of(x) == dtype):
        return x
    if is_number(x) and not isinstance(x, NumberInput):
        with np.errstate(all="ignore"):
            return jnp.asarray(np.asarray(x).astype(numpy_dtype(dtype)).astype(numpy_dtype(wide)))
    info = jnp.finfo(numpy_dtype(dtype))
    x = cast(x, wide)
    result = lax.reduce_precision(x, info.nexp, info.nmant)  # XLA would skip a cast there and back
    if info.tiny == jnp.finfo(x.dtype).tiny:
        return result
    step = float(info.smallest_subnormal)  # of what would become 0
    small = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(lax.abs(x) < float(info.tiny), small, result)


def broadcast(*operands: Any, dtype: torch.dtype) -> list[jax.Array]:
    """Operands as arrays of `dtype`, broadcast to one shape."""
    arrays = [cast(x, dtype) for x in operands]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in arrays]


def widen(x: jax.Array, floating: bool = False) -> jax.Array:
    """One array in its `compute_type`."""
    return cast(x, compute_type(x, floating=floating))


def is_complex(x: jax.Array) -> bool:
    """Whether the array holds complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_floating(x: jax.Array) -> bool:
    """Whether the array holds real floating-point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)
