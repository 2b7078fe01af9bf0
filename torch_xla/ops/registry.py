"""The table of lowering rules: one JAX function per PyTorch operator.

A rule is a function ``rule(ctx, *args, **kwargs)`` that receives the operator's arguments in schema order (keyword-only
arguments by keyword, defaults filled in) and returns one JAX array, or a tuple of them for operators with several
results. Tensors arrive as JAX arrays, numbers as Python numbers or `Lifted`, everything else as PyTorch would pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import jax

# 2^64 divided by the golden ratio, as a signed 64-bit number: offsets times this spread over all keys.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape and dtype that PyTorch promises for one result.

    Attributes:
        shape: Logical sizes.
        dtype: PyTorch dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Lifted:
    """A Python number whose value is an input of the program, not a constant in it.

    Attributes:
        value: 0-d array (int64, float64, or complex128).
        kind: Python type of the number; PyTorch's promotion treats it as such a "wrapped number".
    """

    value: jax.Array
    kind: type


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule may ask beside its arguments.

    Attributes:
        op: Name of the operator, such as ``aten.add.Tensor``.
        out: Promised results; None where the operator returns an undefined tensor.
        seed: Two int64 scalars (seed, offset) for operators that draw random numbers, else None.
    """

    op: str
    out: tuple[Meta | None, ...]
    seed: tuple[jax.Array, jax.Array] | None = None

    @property
    def meta(self) -> Meta:
        """The first promised result."""
        meta = self.out[0]
        assert meta is not None
        return meta

    def constant(self, number: Any) -> Any:
        """The Python value of a number that shapes the program, such as the exponent of `pow`.

        Raises:
            StaticNumbers: The number is lifted; the caller records it as a constant and lowers again.
        """
        if isinstance(number, Lifted):
            raise StaticNumbers(self.op)
        return number

    def key(self) -> jax.Array:
        """A JAX random key that is unique for this operator call.

        Raises:
            RuntimeError: The recorder did not give this operator a seed.
        """
        import jax

        if self.seed is None:
            raise RuntimeError(f"[lower {self.op}] draws random numbers but was recorded without a seed")
        seed, offset = self.seed
        # One wrapping 64-bit number, so that (seed, offset) can be saved and resumed as one integer.
        return jax.random.key(seed + offset * GOLDEN, impl="threefry2x32")


class StaticNumbers(Exception):
    """An operator cannot be lowered with its numbers as inputs; record them as constants.

    Attributes:
        op: Name of the operator overload.
    """

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.op = op


Rule = Callable[..., Any]

_RULES: dict[str, Rule] = {}


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the rule of the named operator overloads.

    Args:
        *names: Overload names with namespace, such as ``"aten.add.Tensor"`` or ``"aten.relu.default"``.

    Raises:
        ValueError: An overload already has a rule.
    """

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


def rule_names() -> Iterator[str]:
    """All overloads that have a rule."""
    return iter(sorted(_RULES))
