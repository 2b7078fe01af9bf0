"""PyTorch's CPU kernels within a program that runs on a CPU, for operators that XLA:CPU is much slower at.

XLA calls them from its own threads, without Python and without the GIL, so such a program is like any other: it is
started asynchronously, overwrites its inputs, and is kept on disk. A program that goes elsewhere, to StableHLO or to
another kind of device, has the operator's rule instead.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import torch
from jax import lax

from torch_xla import _bindings, _config
from torch_xla._torch_internals import OpOverload
from torch_xla.ops import dtypes
from torch_xla.ops.args import ints
from torch_xla.ops.registry import Meta, varied_arguments

_TARGET = "torch_xla.host_kernel"
# Multiplications below which a kernel stays in its thread: waking PyTorch's others takes longer.
_PARALLEL = 20_000_000
_ASIDE = 500_000_000  # the same for what nothing waits for: XLA computes other things beside it in its own threads
_LEAST = 1 << 14  # values below which XLA's code is as fast
_FUSED = 1 << 14  # values above which a normalization is better fused by XLA with what is around it
_NARROW = 16  # width of heads below which XLA's products and softmax are quicker,
_IN_CACHE = 1 << 20  # up to so many scores
_PER_VALUE = 64  # multiplications that other work on a value is worth
_INTEGERS = frozenset("int64 int32 int16 int8 uint8".split())
_PLAIN = _INTEGERS | {"float32", "float64"}
_HALF = ("bfloat16", "float16")
_PRODUCTS = ("aten::bmm", "aten::linear", "aten::mm")
_WIDE = ("aten::native_layer_norm_backward",)  # take no statistics in float32 beside 16-bit types

_enabled: ContextVar[bool] = ContextVar("host kernels", default=False)


@functools.cache
def register() -> bool:
    """Makes the kernels known to XLA; False if this package was built where jaxlib's headers were missing or others."""
    target = _bindings.host_kernel_target()
    if target is None:
        return False
    try:
        jax.ffi.register_ffi_target(_TARGET, target, platform="cpu")
    except Exception as error:
        warnings.warn(
            f"[host kernel] jaxlib {version('jaxlib')} does not take PyTorch's kernels ({error}): convolutions and "
            "some others are slower on this CPU; install torch_xla again beside this jaxlib",
            stacklevel=2,
        )
        return False
    return True


def enabled(on: bool) -> AbstractContextManager[None]:
    """A scope in which programs are lowered to run on this machine's CPU, or are not."""
    return _config.within(_enabled, on and register() and not dtypes.shortens())


def in_use() -> bool:
    """Whether this is such a scope; part of what a lowered operator is."""
    return _enabled.get()


def once(x: jax.Array) -> jax.Array:
    """A value that XLA:CPU computes once, and not again in each fusion, or at each place, where one reads it."""
    return lax.optimization_barrier(x) if in_use() else x


def attempt(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Sequence[Meta | None],
    aside: bool = False,
) -> tuple[Any, ...] | None:
    """Places PyTorch's kernel into the program, where XLA:CPU would be much slower; None, with nothing done, elsewhere.

    There are no tensors in lists. With `aside` hardly anything waits for the results, such as gradients of weights.
    Returns one array per result of the Meta kernel, None where undefined.
    """
    # A kernel is called with the numbers that its schema wants, and these are none while the program is made.
    if not (_enabled.get() and str(op) in OPERATORS) or varied_arguments(args, kwargs):
        return None
    multiplications = work(str(op), args, **kwargs)
    if not multiplications:
        return None
    with jax.named_scope(op.name().split("::")[-1]):
        return _place(op, args, kwargs, out, multiplications >= (_ASIDE if aside else _PARALLEL))


def work(name: str, args: Sequence[Any], **kwargs: Any) -> int:
    """Roughly how many multiplications one of `OPERATORS` takes; 0 where XLA:CPU is not much slower."""
    return OPERATORS[name](*args, **kwargs)


def _place(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Meta | None], parallel: bool
) -> tuple[Any, ...]:
    name = op._schema.name
    kernel = (_writing(op) if None not in out else None) or op
    arrays: list[jax.Array] = []
    operands: list[int] = []
    attributes: dict[str, Any] = {}
    remaining = iter(args)
    for argument in op._schema.arguments:
        value = kwargs[argument.name] if argument.name in kwargs else next(remaining, argument.default_value)
        if "Tensor" in str(argument.type):
            operands.append(-1 if value is None else len(arrays))
            arrays += [] if value is None else [value.astype(_widened(value.dtype, name))]
        elif value is not None:
            attributes[argument.name] = _attribute(value)
    metas = [meta for meta in out if meta is not None]
    counted = iter(range(len(metas)))
    call = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(m.shape, _widened(dtypes.numpy_dtype(m.dtype), name)) for m in metas],
        vmap_method="sequential",
    )
    outputs = call(
        *arrays,
        _name=name,
        _overload=kernel._schema.overload_name,
        _operands=_attribute(operands),
        _parallel=parallel,
        _results=_attribute([-1 if meta is None else next(counted) for meta in out]),
        **attributes,
    )
    values = iter(outputs)
    return tuple(None if meta is None else next(values) for meta in out)


@functools.cache
def _writing(op: OpOverload) -> OpOverload | None:
    """The form of an operator that puts its results where it is told, if there is one: saves memory and a copy."""
    signature = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        form = getattr(op.overloadpacket, name)
        form_signature = [(a.name, str(a.type)) for a in form._schema.arguments if a.alias_info is None]
        written = [a for a in form._schema.arguments if a.alias_info is not None]
        if (
            form_signature == signature
            and len(written) == len(op._schema.returns)
            and all(a.kwarg_only for a in written)
        ):
            return form
    return None


def _attribute(value: bool | int | float | Sequence[int]) -> Any:
    if isinstance(value, bool):
        return value
    return np.float64(value) if isinstance(value, float) else np.array(value, np.int64)[()]


def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: object,
    stride: Sequence[int],
    padding: object,
    dilation: object,
    transposed: bool,
    *rest: object,
) -> int:
    if x.dtype.name not in ("float32", *_HALF):
        return 0
    steps = 1 if transposed else math.prod(ints(stride, x.ndim - 2))
    return -(-math.prod(x.shape[2:]) // steps) * x.shape[0] * weight.size


def _convolution_backward(grad: jax.Array, *arguments: Any) -> int:
    return 2 * _convolution(*arguments) if grad.size else 0


def _enough(work: int) -> int:
    return work if work >= _PER_VALUE * _LEAST else 0


def _values(x: jax.Array, *rest: object, dtype: object = None, **others: object) -> int:
    return _enough(_PER_VALUE * x.size) if dtype is None and x.dtype.name in _PLAIN else 0


def _transform(x: jax.Array, *rest: object) -> int:
    return _enough(_PER_VALUE * x.size)


def _by_row(x: jax.Array, dim: int | None = None, *rest: object, **others: object) -> int:
    return _values(x) if dim is not None else 0


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, *rest: object, attn_mask: Any = None, **others: Any) -> int:
    plain = q.ndim == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == v.shape[3]
    masked = attn_mask is None or attn_mask.ndim in (2, 4) and attn_mask.dtype == q.dtype
    if not plain or not masked or q.dtype.name not in ("float32", *_HALF):
        return 0
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if q.shape[3] < _NARROW and scores < _IN_CACHE:
        return 0
    return _enough(scores * (2 * q.shape[3] + _PER_VALUE))  # each is an exponential beside the products


def _attention_backward(grad: jax.Array, *arguments: Any, **keywords: Any) -> int:
    return 2 * _attention(*arguments, **keywords)


def _matrices(x: jax.Array, y: jax.Array) -> int:
    return _products(x, y.shape[-1], batched=x.ndim == 3)


def _linear(x: jax.Array, weight: jax.Array, *rest: object) -> int:
    return _products(x, weight.size // x.shape[-1] if x.size else 0)


def _products(x: jax.Array, columns: int, batched: bool = False) -> int:
    slow = batched if x.dtype == np.float32 else x.dtype.name in _INTEGERS or x.dtype.name in _fast_halves()
    return _enough(x.size * columns) if slow else 0


def _rows(x: jax.Array, y: jax.Array, *rest: object) -> int:
    """A product over the rows of both, before which XLA:CPU transposes."""
    return _enough(x.size * y.shape[1]) if x.dtype == np.float32 else 0


def _layer_norm(x: jax.Array, *rest: object) -> int:
    # Each sum in a program costs the host some 0.4 us whenever that starts.
    return _PER_VALUE * x.size if x.size <= _FUSED and x.dtype.name in ("float32", "float64") else 0


def _layer_norm_backward(grad: jax.Array, *rest: object) -> int:
    return _PER_VALUE * grad.size


@functools.cache
def _fast_halves() -> frozenset[str]:
    """The half types in which PyTorch's products and convolutions compute on this machine without scalar code."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    mkldnn = torch.ops.mkldnn
    support_checks = {"bfloat16": mkldnn._is_mkldnn_bf16_supported, "float16": mkldnn._is_mkldnn_fp16_supported}
    return frozenset(name for name, supported in support_checks.items() if supported())


def _widened(dtype: Any, name: str) -> Any:
    """The dtype to compute in: float32 for a half type that is slow; what sums does so in float32 anyway."""
    # Of float16 PyTorch has fast products, but neither convolutions nor attention with gradients.
    slow = dtype.name not in _fast_halves() or name in _WIDE or dtype == np.float16 and name not in _PRODUCTS
    return np.dtype(np.float32) if slow and dtype.name in _HALF else dtype


def _scattered(x: jax.Array, mask: jax.Array, source: jax.Array) -> int:
    """Whether there may be fewer values than places, which the kernel refuses when it runs."""
    places = math.prod(np.broadcast_shapes(x.shape, mask.shape))
    return places if source.size < places else 0


# What such arguments take, by overload.
OPERATORS: dict[str, Callable[..., int]] = {
    "aten._fft_c2c.default": _transform,
    "aten._fft_c2r.default": _transform,
    "aten._fft_r2c.default": _transform,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.argmax.default": _by_row,
    "aten.argmin.default": _by_row,
    "aten.bmm.default": _matrices,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.cumprod.default": _values,
    "aten.cumsum.default": _values,
    "aten.grid_sampler_2d.default": _values,
    "aten.grid_sampler_2d_backward.default": _values,
    "aten.kthvalue.default": _values,
    "aten.linear.default": _linear,
    "aten.masked_scatter.default": _scattered,
    "aten.max.dim": _values,
    "aten.max_pool2d_with_indices_backward.default": _values,
    "aten.max_pool3d_with_indices_backward.default": _values,
    "aten.median.default": _values,
    "aten.median.dim": _values,
    "aten.min.dim": _values,
    "aten.mm.default": _matrices,
    "aten.mode.default": _values,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.sort.default": _values,
    "aten.sort.stable": _values,
    "aten.tensordot.default": _rows,
    "aten.upsample_bicubic2d.default": _values,
    "aten.upsample_bicubic2d_backward.default": _values,
    "aten.upsample_bilinear2d.default": _values,
    "aten.upsample_bilinear2d_backward.default": _values,
}
