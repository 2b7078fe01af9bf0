"""The table of lowering rules: one JAX function per PyTorch operator.

A rule is a function ``rule(ctx, *args, **kwargs)`` that receives the operator's arguments in schema order (keyword-only
arguments by keyword, defaults filled in) and returns one JAX array, or a tuple of them for operators with several
results. Tensors arrive as JAX arrays, numbers as Python numbers or `NumberInput`, everything else as PyTorch would
pass it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import jax

# 2^64 divided by the golden ratio, as a signed 64-bit number: offsets times this spread over all keys.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape and dtype of a result, from PyTorch's Meta kernel."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_WITH_OWN_TEXT = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def has_own_text(arguments: Any) -> bool:
    """Whether the text of a nest of arguments tells it from all others; an object's may come again once it is gone."""
    if isinstance(arguments, dict):
        return all(map(has_own_text, arguments.values()))
    if isinstance(arguments, (list, tuple)):
        return all(map(has_own_text, arguments))
    return isinstance(arguments, _WITH_OWN_TEXT)


class StaticNumbers(Exception):
    """An operator cannot be lowered with numbers as inputs: those of `arguments`, or None for all, become constants."""

    def __init__(self, op: str, arguments: tuple[int, ...] | None = None) -> None:
        super().__init__(op, arguments)
        self.op = op
        self.arguments = arguments


@dataclass(frozen=True, slots=True, eq=False)
class NumberInput:
    """A Python number whose value is an input of the program, not a constant in it.

    It takes part in arithmetic as the number would: with an array, whose type it takes as far as JAX's promotion lets a
    Python number, and with other numbers. Whoever asks for its value raises `StaticNumbers`.
    """

    value: jax.Array  # 0-d: int64, float64 or complex128
    kind: type  # PyTorch's promotion treats it as such a "wrapped number"
    op: str = ""  # the operator that it is given to, if its arguments may become constants
    argument: int | None = None  # position of the argument that it is, or that it is an element of
    varied: bool = False  # it was a constant until it varied, and is one again where no rule can do without its value

    def as_type(self, array: Any) -> jax.Array:
        """Its value as JAX would take the number beside an array."""
        import jax.numpy as jnp

        return self.value.astype(jnp.result_type(array, self.kind(0)))

    def require_constant(self, *_: object) -> Any:
        """Raises `StaticNumbers`: the program needs the value."""
        raise StaticNumbers(self.op, None if self.argument is None else (self.argument,))

    __bool__ = __int__ = __index__ = __float__ = __complex__ = __hash__ = require_constant
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __round__ = __floor__ = __ceil__ = require_constant
    __iter__ = __len__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = require_constant

    def _combined(self, other: Any, function: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, (NumberInput, bool, int, float, complex)):
            value = function(self.value, other.value if isinstance(other, NumberInput) else other)
            return replace(self, value=value, kind=type(value.dtype.type(0).item()))
        return function(self.as_type(other), other)

    def __add__(self, other: Any) -> Any:
        return self._combined(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._combined(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._combined(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        return self._combined(other, operator.mul)

    def __truediv__(self, other: Any) -> Any:
        return self._combined(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Any:
        return self._combined(other, lambda a, b: b / a)

    def __pow__(self, other: Any) -> Any:
        return self._combined(other, operator.pow)

    def __rpow__(self, other: Any) -> Any:
        return self._combined(other, lambda a, b: b**a)

    def __neg__(self) -> NumberInput:
        return replace(self, value=-self.value)

    __radd__ = __add__
    __rmul__ = __mul__


def varied_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Positions of the arguments that are, or have, numbers that were constants until they varied."""
    elements = itertools.chain.from_iterable(
        x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values())
    )
    return tuple(
        sorted({x.argument for x in elements if isinstance(x, NumberInput) and x.varied and x.argument is not None})
    )


def array_of(number: Any) -> Any:
    """A number as JAX's functions take it: an array if it is lifted, else itself."""
    return number.value if isinstance(number, NumberInput) else number


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule can read beside its arguments."""

    op: str  # such as ``aten.add.Tensor``
    out: tuple[Meta | None, ...]  # types of the results; None where the operator returns an undefined tensor
    seed: tuple[jax.Array, jax.Array] | None = None  # uint32 scalars, see `seed_words`, where random numbers are drawn

    @property
    def meta(self) -> Meta:
        """The type of the first result."""
        meta = self.out[0]
        assert meta is not None
        return meta

    def constant(self, number: Any) -> Any:
        """The Python value of a number that shapes the program, such as the exponent of `pow`.

        Raises StaticNumbers where it is lifted: the caller records it as a constant and lowers again.
        """
        return number.require_constant() if isinstance(number, NumberInput) else number

    def key(self) -> jax.Array:
        """A JAX random key that is unique for this operator call; RuntimeError where the recorder gave no seed."""
        import jax

        if self.seed is None:
            raise RuntimeError(f"[lower {self.op}] draws random numbers but was recorded without a seed")
        return jax.random.wrap_key_data(jax.numpy.stack(self.seed), impl="threefry2x32")


def seed_words(seed: Any, offset: Any) -> tuple[Any, Any]:
    """The seed that an operator draws from: one wrapping number of 64 bits, as the words that programs take."""
    key = seed + offset * GOLDEN
    if isinstance(key, int):
        return np.uint32(key >> 32 & _WORD), np.uint32(key & _WORD)
    return (key >> 32).astype(np.uint32), key.astype(np.uint32)


Rule = Callable[..., Any]

_RULES: dict[str, Rule] = {}


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the rule of operator overloads, such as ``"aten.add.Tensor"``."""

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                other = _RULES[name]
                raise ValueError(f"[ops] {name} has two rules: {other.__module__}.{other.__name__} and {rule.__name__}")
            _RULES[name] = rule
        return rule

    return register


def rule_for(name: str) -> Rule | None:
    """The rule of an overload, or None."""
    return _RULES.get(name)
