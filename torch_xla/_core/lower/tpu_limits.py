"""Keeps away from XLA for TPUs what ends the process there: it computes 64-bit floats by pairs of 32-bit ones.

Of complex128 its compiler has no conversions, quotients or absolute values: `by_parts` writes them with real numbers.
The bits of a float64 would be those of the pair: `by_parts` computes them, so that signs and exponents are right.
What else it aborts on is refused while a graph is lowered, with the user's line (`check`). All were found by compiling
for a v5e with libtpu 0.0.42; `docs/tpu.md` has the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import torch

from torch_xla._errors import message
from torch_xla._jax_internals import all_eqns, ir, stablehlo
from torch_xla.ops.registry import Meta

applies: ContextVar[bool] = ContextVar("tpu_limits", default=False)  # whether the program is for TPUs

_COMPLEX = np.dtype(np.complex128)
# Primitives of JAX with complex128 at which XLA for TPUs ends the process.
_REFUSED = frozenset(
    """cholesky eig eigh expm1 householder_product logistic pow qr rsqrt scatter scatter-add scatter_mul svd tan tanh
    triangular_solve""".split()
)


def check(outs: Sequence[Meta | None], rule: Callable[..., Any], tensors: Sequence[Any], *more: Any) -> None:
    """Refuses a rule of `tensors` and `more` that computes what XLA ends the process on in programs for TPUs.

    Raises NotImplementedError for such a rule. `outs` are the results that it promises; `tensors` may be tracers.
    """
    if not applies.get():
        return
    dtypes = {t.dtype for t in tensors} | {_COMPLEX for meta in outs if meta and meta.dtype == torch.complex128}
    if _COMPLEX not in dtypes:
        return
    avals = jax.tree.map(jax.typeof, (tensors, *more))
    for _, equation in all_eqns(jax.make_jaxpr(rule)(*avals).jaxpr):
        variables = (*equation.invars, *equation.outvars)
        if equation.primitive.name in _REFUSED and any(getattr(v.aval, "dtype", None) == _COMPLEX for v in variables):
            problem = f"got {equation.primitive.name} of complex128, which XLA for TPUs lacks"
            raise NotImplementedError(message("tpu", problem, do="use complex64, or compute it on the CPU"))


def by_parts(module: Any) -> None:
    """Replaces what XLA for TPUs has not, or has otherwise, of complex128 and of bits of float64, in a program."""
    found: list[Any] = []

    def take(operation: Any) -> Any:
        if operation.name == "stablehlo.bitcast_convert":
            wanted = isinstance(_element(operation.operands[0].type), ir.F64Type)
        else:
            wanted = operation.name in _PARTS and any(map(_is_complex128, (*operation.operands, *operation.results)))
        if wanted:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(take)
    with module.context:
        for operation in found:
            (result,) = operation.results
            with ir.InsertionPoint(operation), operation.location:
                result.replace_all_uses_with(_PARTS[operation.name](result.type, *operation.operands))
            operation.operation.erase()


def _element(type_: Any) -> Any:
    """The type of the elements, or of the parts of complex ones."""
    element = ir.RankedTensorType(type_).element_type
    return ir.ComplexType(element).element_type if isinstance(element, ir.ComplexType) else element


def _is_pair(type_: Any) -> bool:
    return isinstance(ir.RankedTensorType(type_).element_type, ir.ComplexType)


def _is_complex128(value: Any) -> bool:
    is_array = isinstance(value.type, ir.RankedTensorType)
    return is_array and _is_pair(value.type) and isinstance(_element(value.type), ir.F64Type)


def _parts(value: Any) -> tuple[Any, Any]:
    return stablehlo.real(value), stablehlo.imag(value)


def _filled(type_: Any, number: float) -> Any:
    attribute = ir.FloatAttr.get(_element(type_), number)
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, attribute))


def _convert(to: Any, value: Any) -> Any:
    part = ir.RankedTensorType.get(ir.RankedTensorType(to).shape, _element(to))
    if not _is_pair(value.type):
        return stablehlo.complex(stablehlo.convert(part, value), _filled(part, 0.0))
    parts = [stablehlo.convert(part, half) for half in _parts(value)]
    return stablehlo.complex(*parts) if _is_pair(to) else parts[0]


def _divide(to: Any, value: Any, by: Any) -> Any:
    """The product with the conjugate, both scaled by the larger part so that no square overflows."""
    re, im = _parts(by)
    scale = stablehlo.maximum(stablehlo.abs(re), stablehlo.abs(im))
    re, im = stablehlo.divide(re, scale), stablehlo.divide(im, scale)
    square = stablehlo.add(stablehlo.multiply(re, re), stablehlo.multiply(im, im))
    product = stablehlo.multiply(value, stablehlo.complex(re, stablehlo.negate(im)))
    return stablehlo.complex(*(stablehlo.divide(stablehlo.divide(half, square), scale) for half in _parts(product)))


def _absolute(to: Any, value: Any) -> Any:
    re, im = map(stablehlo.abs, _parts(value))
    larger, smaller = stablehlo.maximum(re, im), stablehlo.minimum(re, im)
    ratio = stablehlo.divide(smaller, larger)
    square = stablehlo.add(_filled(to, 1.0), stablehlo.multiply(ratio, ratio))
    length = stablehlo.multiply(larger, stablehlo.sqrt(square))
    plain = stablehlo.or_(*(_is(larger, "EQ", _filled(to, edge)) for edge in (0.0, math.inf)))
    return stablehlo.select(plain, larger, length)


def _bits(to: Any, value: Any) -> Any:
    """Those of float32 `high`, made longer; what `low` adds to them is counted in units of the last one."""
    kinds = ir.F32Type.get(), *map(ir.IntegerType.get_signless, (32, 64))
    single, word, long = (ir.RankedTensorType.get(ir.RankedTensorType(value.type).shape, kind) for kind in kinds)

    def number(type_: Any, integer: int) -> Any:
        return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(_element(type_), integer)))

    def shifted(x: Any, by: int) -> Any:
        return stablehlo.shift_left(x, number(x.type, by))

    sign = stablehlo.and_(stablehlo.bitcast_convert(word, stablehlo.convert(single, value)), number(word, -(1 << 31)))
    value = stablehlo.abs(value)
    high = stablehlo.convert(single, value)
    low = stablehlo.convert(single, stablehlo.subtract(value, stablehlo.convert(value.type, high)))
    magnitude = stablehlo.bitcast_convert(word, high)
    exponent = stablehlo.shift_right_logical(magnitude, number(word, 23))
    # By powers of two that float32 has: low is less than 2^(exponent - 150).
    scale = stablehlo.bitcast_convert(single, shifted(stablehlo.subtract(number(word, 255), exponent), 23))
    units = stablehlo.multiply(stablehlo.multiply(low, scale), _filled(single, 2.0**51))
    # Below a power of two units are half as large.
    below = stablehlo.and_(_is(shifted(magnitude, 9), "EQ", number(word, 0)), _is(units, "LT", _filled(single, 0.0)))
    units = stablehlo.round_nearest_even(stablehlo.select(below, stablehlo.add(units, units), units))
    zero, bias = number(long, 0), number(long, 896 << 52)
    top = _is(exponent, "EQ", number(word, 255))  # infinite, or NaN
    more = stablehlo.select(top, bias, stablehlo.convert(long, units))
    longer = stablehlo.add(stablehlo.add(shifted(stablehlo.convert(long, magnitude), 29), bias), more)
    longer = stablehlo.select(_is(exponent, "EQ", number(word, 0)), zero, longer)
    return stablehlo.bitcast_convert(to, stablehlo.or_(longer, shifted(stablehlo.convert(long, sign), 32)))


def _is(x: Any, direction: str, y: Any) -> Any:
    return stablehlo.compare(x, y, stablehlo.ComparisonDirectionAttr.get(direction))


_PARTS: dict[str, Callable[..., Any]] = {
    "stablehlo.convert": _convert,
    "stablehlo.divide": _divide,
    "stablehlo.abs": _absolute,
    "stablehlo.bitcast_convert": _bits,
}
