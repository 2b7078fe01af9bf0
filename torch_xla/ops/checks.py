"""Refuses calls that PyTorch's CPU kernels refuse and its Meta kernels accept: with the same error, at the call.

The recorder asks once per signature: operator, dtypes, shapes and constants. The CPU kernel answers, because its words
are those that users know: it runs on small tensors, and what it says of zeros, ones and other values alike is not about
values. Where tensors are large it is asked only if a condition below says so: what is refused takes no time.

Numbers that are inputs of a program are no part of the signature. Those that no dtype of the call can hold are asked
about one by one, for the operators of `_NUMBER_CONDITIONS` all are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_xla._torch_internals import OpOverload, has_computed_kernel, has_kernel

Probe = Callable[[int, int], None]
Condition = Callable[..., bool]

_MEDIUM = 1 << 16
_SMALL = 1 << 24
_ANY = 1 << 40  # pages of zeros that nobody touches take no memory
_ZEROS, _ONES, _MIXED = range(3)  # what the tensors hold
_NO_KERNEL = "not implemented for '"  # and a type, whatever the values

_CONDITIONS: dict[str, Condition] = {}


def probe_if(*names: str) -> Callable[[Condition], Condition]:
    """Registers when the CPU kernel may refuse a call, whatever its size.

    An operator stands for all of its overloads, and for those that write their first argument.
    """

    def register(condition: Condition) -> Condition:
        _CONDITIONS.update(dict.fromkeys(names, condition))
        return condition

    return register


# Whether all numbers of an operator matter, by its first tensor.
_NUMBER_CONDITIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "aten.elu_backward": lambda _: True,
    "aten.hardtanh": lambda x: x.dtype == torch.uint8,
    "aten.histc": lambda _: True,
    "aten.leaky_relu_backward": lambda _: True,
    "aten.multi_margin_loss": lambda _: True,
    "aten.pow": lambda x: not x.dtype.is_floating_point,
    "aten.renorm": lambda _: True,
    "aten.rrelu_with_noise": lambda _: True,
    "aten.softshrink": lambda _: True,
}


# Kernels of other devices take integers too, and libraries give them some, as to count the tokens of each expert.
_WIDER = frozenset({"aten.histc"})

# They say the same of all values but a few.
_OF_VALUES = frozenset({"aten.segment_reduce"})


class _Facts(NamedTuple):
    """Facts about an operator from its schema."""

    condition: Condition | None
    by_number: Callable[[torch.Tensor], bool] | None  # whether all of its numbers matter, by its first tensor
    has_cpu_kernel: bool  # whether its CPU kernel can be asked at all
    own_kernel: bool  # whether that is its own, not made of others'
    wider: bool  # whether other devices take more types
    backward: bool  # whether it is part of a backward pass
    numbers: tuple[int, ...]  # positions of those that are inputs of the program
    out: frozenset[int]  # positions of its out= arguments


def check_call(op: str, recorded: str, arguments: Sequence[Any], result_bytes: int, probe: Probe) -> float:
    """Raises what the CPU kernel says of a call that it refuses.

    `recorded` is the overload that the node stands for, `arguments` are all of the schema's in order. `probe` runs the
    CPU kernel on tensors of these shapes; it is given the size of the largest tensor for which it does, and what they
    hold. Returns the magnitude up to which numbers do not matter: infinity where none do.
    """
    if not op.startswith("aten."):
        return math.inf
    facts = _facts(op)
    if facts.condition is not None and facts.condition(*arguments):
        probe(_ANY, _ZEROS)
    tensors = list(_tensors(arguments))
    if not tensors or not facts.has_cpu_kernel:
        return math.inf
    unprobed = _largest_unprobed(facts, arguments, tensors)
    outside = any(_magnitude(arguments[i]) > unprobed for i in facts.numbers)
    if outside and unprobed >= 0:
        _raise_if_sure(probe, _SMALL)
    else:
        _probe(facts, recorded, arguments, tensors, result_bytes, probe)
    return unprobed


def _probe(
    facts: _Facts, recorded: str, arguments: Sequence[Any], tensors: list[torch.Tensor], result_bytes: int, probe: Probe
) -> None:
    dtypes = {t.dtype for t in tensors}
    mixed = len(dtypes) > 1 and all(dtype.is_floating_point for dtype in dtypes)
    size = result_bytes + sum(t.numel() * t.element_size() for t in tensors)
    # Floating-point types are mixed seldom, and mostly by mistake.
    if size > (_SMALL if mixed else _MEDIUM):
        return
    narrow = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in dtypes)
    empty = any(
        t.numel() == 0 for i, argument in enumerate(arguments) if i not in facts.out for t in _tensors((argument,))
    )
    # A backward operator gets what its forward gave; statistics of 16-bit tensors are float32 here, unlike on the CPU.
    if facts.backward and (narrow or empty):
        return
    try:
        if empty:
            probe(_SMALL, _ZEROS)  # there are no values
        else:
            _raise_if_sure(probe, _SMALL)
    except NotImplementedError as error:
        if _lacks(facts, recorded, str(error), plain=dtypes <= {torch.float32, torch.float64} and not empty):
            raise


def _raise_if_sure(probe: Probe, size: int) -> None:
    """Raises what the CPU kernel says of all values alike, or of types."""
    try:
        probe(size, _ZEROS)
    except Exception as error:
        if isinstance(error, NotImplementedError) and _NO_KERNEL in str(error):
            raise
        for values in (_ONES, _MIXED):
            try:
                probe(size, values)
            except Exception as other:
                if type(other) is not type(error) or str(other) != str(error):
                    return
            else:
                return
        raise


def _lacks(facts: _Facts, recorded: str, text: str, plain: bool) -> bool:
    """Whether an operator is refused because the CPU has no kernel for its types.

    PyTorch leaves uint16, uint32 and uint64 to compilers, and has few kernels for them; XLA has all kernels in 16 bits.
    """
    if _NO_KERNEL not in text:
        return facts.own_kernel and not facts.backward and not plain
    from torch_xla.ops.call import way_of

    of_xla = any(name in text for name in ("'UInt", "'Half'", "'BFloat16'"))
    wider = facts.wider and "'Complex" not in text
    return not wider and (not of_xla or way_of(recorded) == "callback")


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        for element in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(element, torch.Tensor) and not element.is_cpu:  # a number comes as one that is
                yield element


def _magnitude(number: Any) -> float:
    if number is None or isinstance(number, (bool, complex)):
        return -1.0  # no input of a program, or told apart by its type
    return math.inf if math.isnan(number) else abs(number)


def _largest_unprobed(facts: _Facts, arguments: Sequence[Any], tensors: list[torch.Tensor]) -> float:
    if not facts.numbers:
        return math.inf
    if facts.by_number is not None and facts.by_number(tensors[0]):
        return -1.0
    dtypes = {t.dtype for t in tensors} - {torch.bool}
    if all(not (d.is_floating_point or d.is_complex) for d in dtypes) and any(
        isinstance(arguments[i], float) for i in facts.numbers
    ):
        return -1.0  # it is rounded, and has a sign that an unsigned type lacks
    return min((_largest(dtype) for dtype in dtypes), default=math.inf)


@functools.cache
def _largest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return 1.0
    real = dtype.to_real() if dtype.is_complex else dtype
    largest = float(torch.finfo(real).max if real.is_floating_point else torch.iinfo(real).max)
    return math.inf if real == torch.float64 else largest


@functools.cache
def _facts(name: str) -> _Facts:
    _, op, overload = name.split(".")
    family = f"aten.{op.removesuffix('_')}"
    op_overload: OpOverload = getattr(getattr(torch.ops.aten, op), overload)
    schema, called, tags = op_overload._schema, op_overload.name(), op_overload.tags
    kinds = [str(argument.type) for argument in schema.arguments]
    view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    draws = torch.Tag.nondeterministic_seeded in tags and not any("Generator" in kind for kind in kinds)
    computed = has_computed_kernel(called, "CPU")
    return _Facts(
        condition=_CONDITIONS.get(name) or (None if overload == "dtype" else _CONDITIONS.get(family)),
        by_number=_NUMBER_CONDITIONS.get(family),
        has_cpu_kernel=computed and not view and not draws and family not in _OF_VALUES,
        own_kernel=has_kernel(called, "CPU"),
        wider=family in _WIDER,
        backward="_backward" in op,
        numbers=tuple(i for i, kind in enumerate(kinds) if kind in ("number", "Optional[number]")),
        out=frozenset(i for i, a in enumerate(schema.arguments) if a.is_out),
    )


def _integer(x: torch.Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _no_index(index: torch.Tensor) -> bool:
    return index.dtype not in (torch.int64, torch.int32)


# Its Meta kernels take any types.
@probe_if("aten.mm", "aten.linear", "aten.addmm", "aten._addmm_activation", "aten.linalg_cross", "aten.addbmm")
@probe_if("aten.huber_loss_backward")
def _mixed(*arguments: Any) -> bool:
    return len({t.dtype for t in _tensors(arguments)}) > 1


@probe_if("aten.multilabel_margin_loss_forward")
def _short_target(self: torch.Tensor, target: torch.Tensor, *_: Any) -> bool:
    return target.dtype != torch.int64


@probe_if("aten.addcmul", "aten.addcdiv", "aten.lerp")
def _complex_for_real(self: torch.Tensor, *others: Any) -> bool:
    return not self.dtype.is_complex and any(isinstance(other, complex) for other in others)


@probe_if("aten.normal")
def _any_but_real(*arguments: Any) -> bool:
    return any(not t.dtype.is_floating_point for t in _tensors(arguments))


@probe_if("aten.poisson")
def _any_integer(*arguments: Any) -> bool:
    return any(_integer(t) for t in _tensors(arguments))


# Their Meta kernels take the shape of the first tensor.
@probe_if("aten.binomial", "aten.rrelu_with_noise", "aten.rrelu_with_noise_functional")
def _integer_or_of_other_shape(*arguments: Any) -> bool:
    first, second = list(_tensors(arguments))[:2]
    return _any_integer(*arguments) or first.shape != second.shape


@probe_if(*(f"aten.bitwise_{name}" for name in ("and", "or", "xor", "not", "left_shift", "right_shift")))
@probe_if("aten.gcd", "aten.lcm")
def _any_float(*arguments: Any) -> bool:
    return any(t.dtype.is_floating_point for t in _tensors(arguments))


@probe_if("aten.index_select", "aten.index_fill", "aten.index_copy", "aten.index_reduce")
def _index(self: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> bool:
    return _no_index(index)


@probe_if("aten.index_add")
def _index_add(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *_: Any) -> bool:
    if _no_index(index) or self.dim() != source.dim() or not self.dim():
        return True
    return any(d != dim % self.dim() and self.shape[d] != source.shape[d] for d in range(self.dim()))


@probe_if("aten.index_put")
def _index_put(self: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> bool:
    sizes = list(self.shape)
    for index in indices:
        index_rank = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index_rank > len(sizes) or (
            index is not None and index_rank and _no_index(index) and index.dtype not in _MASKS
        ):
            return True
        if index is not None and index.dtype in _MASKS and list(index.shape) != sizes[:index_rank]:
            return True  # a mask has the sizes of the dimensions that it stands for
        sizes = sizes[index_rank:]
    return False


_MASKS = (torch.bool, torch.uint8)


@probe_if("aten.put")
def _put(self: torch.Tensor, index: torch.Tensor, *_: Any) -> bool:
    return index.dtype != torch.int64


@probe_if("aten.masked_scatter")
def _masked_scatter(self: torch.Tensor, mask: torch.Tensor, *_: Any) -> bool:
    return mask.dtype != torch.bool


@probe_if("aten.bucketize.Tensor")
def _bucketize(self: torch.Tensor, boundaries: torch.Tensor, *_: Any) -> bool:
    return boundaries.dim() != 1


# Of other indices and offsets the CPU kernel writes beside its tensors; functions of torch.nn make them so.
@probe_if("aten._embedding_bag", "aten._embedding_bag_forward_only")
def _bags(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *_: Any) -> bool:
    for name, tensor in (("input", indices), ("offsets", offsets)):
        if tensor.dim() != 1:
            raise ValueError(f"{name} has to be a 1D Tensor, but got Tensor of dimension {tensor.dim()}")
    return False


# A result that was written in place does not tell what the input was.
@probe_if("aten.leaky_relu_backward")
def _lost_sign(grad: torch.Tensor, x: torch.Tensor, slope: float, is_result: bool, *_: Any) -> bool:
    return is_result and slope < 0


@probe_if("aten.elu_backward")
def _lost_sign_of_elu(
    grad: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, *_: Any
) -> bool:
    return is_result and alpha < 0


@probe_if("aten.native_dropout")
def _dropout(self: torch.Tensor, p: float, *_: Any) -> bool:
    return _integer(self) or _no_probability(p)


def _no_probability(p: float) -> bool:
    return not 0 <= p <= 1


@probe_if("aten.bernoulli_.float", "aten.bernoulli.p")
def _bernoulli(self: torch.Tensor, p: float, *_: Any) -> bool:
    return _no_probability(p)


@probe_if("aten.bernoulli.default")
def _bernoulli_of(self: torch.Tensor, *_: Any) -> bool:
    return _integer(self)


@probe_if("aten.bernoulli_.Tensor")
def _bernoulli_by(self: torch.Tensor, p: torch.Tensor, *_: Any) -> bool:
    return _integer(p)


@probe_if("aten.uniform_")
def _uniform(self: torch.Tensor, low: float, high: float, *_: Any) -> bool:
    return not self.dtype.is_floating_point or low > high


def _range(low: int, high: int, dtype: torch.dtype) -> bool:
    """Whether integers from `low` to below `high` may be none, or none that the type has."""
    if low >= high:
        return True
    if dtype == torch.bool:
        return low < 0 or high > 2
    return not dtype.is_floating_point and (low < torch.iinfo(dtype).min or high - 1 > torch.iinfo(dtype).max)


@probe_if("aten.random_.from")
def _random_from(self: torch.Tensor, low: int, high: int | None, *_: Any) -> bool:
    return high is not None and _range(low, high, self.dtype)


@probe_if("aten.random_.to")
def _random_to(self: torch.Tensor, high: int, *_: Any) -> bool:
    return _range(0, high, self.dtype)


@probe_if("aten.randint.low")
def _randint_low(low: int, high: int, size: Any, dtype: int | None, *_: Any) -> bool:
    return _range(low, high, torch.int64 if dtype is None else _INTEGERS.get(dtype, torch.float64))


@probe_if("aten.randint.default")
def _randint(high: int, size: Any, *options: Any) -> bool:
    return _randint_low(0, high, size, *options)


# Types as arguments have them.
_INTEGERS = {0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 11: torch.bool}


@probe_if("aten.pow.Tensor_Scalar", "aten.pow_.Scalar")
def _power(self: torch.Tensor, exponent: Any) -> bool:
    return _integer(self) and isinstance(exponent, int) and exponent < 0


@probe_if("aten.linalg_lu", "aten.linalg_lu_factor_ex")
def _without_pivots(self: torch.Tensor, pivot: bool, *_: Any) -> bool:
    return not pivot


@probe_if("aten.aminmax.out")
def _aminmax(self: torch.Tensor, dim: Any, keepdim: bool, low: torch.Tensor, high: torch.Tensor) -> bool:
    return {low.dtype, high.dtype} != {self.dtype}


@probe_if("aten.multinomial")
def _multinomial(self: torch.Tensor, count: int, replacement: bool, *others: Any) -> bool:
    if self.dim() and self.shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")
    out = list(_tensors(others))
    return (
        not (self.dtype.is_floating_point and 1 <= self.dim() <= 2 and count > 0)
        or (not replacement and count > self.shape[-1])
        or any(t.dtype != torch.int64 for t in out)
    )


@probe_if("aten.complex")
def _complex(real: torch.Tensor, imaginary: torch.Tensor, *out: torch.Tensor) -> bool:
    return real.dtype != imaginary.dtype or any(t.dtype != real.dtype.to_complex() for t in out)


@probe_if("aten.convolution.default")
def _convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, *_: Any) -> bool:
    return min(stride) < 1 or min(padding) < 0 or min(dilation) < 1


@probe_if(*(f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)))
def _pad(self: torch.Tensor, padding: Sequence[int], *_: Any) -> bool:
    return self.dim() not in (len(padding) // 2 + 1, len(padding) // 2 + 2)


@probe_if("aten.histc")
def _histogram(self: torch.Tensor, bins: int, low: float, high: float, *_: Any) -> bool:
    return not (low <= high and math.isfinite(low) and math.isfinite(high))


@probe_if("aten.renorm")
def _renorm(self: torch.Tensor, p: float, dim: int, most: float, *_: Any) -> bool:
    return isinstance(p, complex) or isinstance(most, complex) or not (p > 0 and most >= 0)


@probe_if("aten.softshrink")
def _shrink(self: torch.Tensor, by: float, *_: Any) -> bool:
    return not 0 <= by <= _largest(self.dtype)


@probe_if("aten.searchsorted.Tensor", "aten.searchsorted.Scalar", "aten.searchsorted.Tensor_out")
def _search(self: torch.Tensor, values: Any, out_int32: bool, right: bool, side: str | None, *_: Any) -> bool:
    return side not in (None, "left", "right") or (right and side == "left")
