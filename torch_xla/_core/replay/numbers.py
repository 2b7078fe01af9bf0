"""Which numbers of a program follow which arguments of a step and settings of its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_xla._core.replay.call import CannotReplay
from torch_xla._core.replay.recorded import Facts

_CALLS = 8  # whose numbers are compared

# What a number may be computed from settings: from one, or from two of them.
_ONE: tuple[Callable[[float], float], ...] = (lambda v: v, lambda v: -v, lambda v: 1 - v)
_TWO: tuple[Callable[[float, float], float], ...] = (
    lambda v, w: 1 - v * w,
    lambda v, w: v * w,
    lambda v, w: -v * w,
)


def same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and (left == right or (left != left and right != right))


@dataclass(frozen=True)
class Rules:
    """Which numbers of a program follow which scalars: Python numbers among the arguments, settings of optimizers.

    Attributes:
        scalars: Those of the latest recorded call.
        varied: Per scalar whether it was seen to; what another value of the rest does is not known.
        numbers: By number a function of all scalars.
    """

    scalars: list[Any]
    varied: list[bool]
    numbers: dict[int, Callable[[list[Any]], Any]]

    def fit(self, scalars: list[Any]) -> bool:
        """Whether it is known what these do."""
        return len(scalars) == len(self.scalars) and all(
            on or same(a, b) for on, a, b in zip(self.varied, scalars, self.scalars, strict=True)
        )


class Numbers:
    """The numbers of recorded calls that became one graph."""

    def __init__(self) -> None:
        self._seen: list[tuple[list[Any], list[Any]]] = []  # scalars and numbers

    def learn(self, facts: Facts) -> Rules:
        """The rules that hold for all calls so far.

        Raises:
            CannotReplay: A number differs for no known reason.
        """
        scalars, numbers = facts.scalars, facts.numbers
        if self._seen and (len(self._seen[0][0]), len(self._seen[0][1])) != (len(scalars), len(numbers)):
            self._seen.clear()
        self._seen.append((list(scalars), list(numbers)))
        del self._seen[:-_CALLS]
        first, *others = self._seen
        varied = [not all(same(s[i], first[0][i]) for s, _ in others) for i in range(len(scalars))]
        rules = {}
        for place, value in enumerate(numbers):
            if place in facts.seeds or all(same(n[place], value) for _, n in self._seen):
                continue
            rule = self._rule(place, varied)
            if rule is None:
                before = next(n[place] for _, n in self._seen if not same(n[place], value))
                del self._seen[:-1]
                _, _, argument, op, line = facts.recording.numbers[place]
                raise CannotReplay(
                    f"argument {argument} of {op} at {line} is {value!r} and was {before!r}, for no reason that can be "
                    "seen; pass it as an argument, or keep it in a tensor"
                )
            rules[place] = rule
        return Rules(list(scalars), varied, rules)

    def _rule(self, place: int, varied: list[bool]) -> Callable[[list[Any]], Any] | None:
        def holds(rule: Callable[[list[Any]], Any]) -> bool:
            return all(rule(scalars) == numbers[place] for scalars, numbers in self._seen)

        indices = [i for i, on in enumerate(varied) if on]
        rules = [partial(_of_one, one, i) for i in indices for one in _ONE]
        rules += [partial(_of_two, two, i, j) for i in indices for j in range(len(varied)) for two in _TWO]
        return next((rule for rule in rules if holds(rule)), None)


def _of_one(function: Callable[[float], float], i: int, scalars: list[Any]) -> Any:
    return function(scalars[i])


def _of_two(function: Callable[[float, float], float], i: int, j: int, scalars: list[Any]) -> Any:
    return function(scalars[i], scalars[j])
