"""Splits inside a program: what a tensor is asked to be split like, where XLA would choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from torch_xla._core.device import placement, shardings

OPERATOR = "xla.place.default"  # gives its argument, in another place


def constrained(value: Any, number: int) -> Any:
    """A value that is to be in the place with a number."""
    place = placement.of(0)
    if not place.mesh:
        return value
    return jax.lax.with_sharding_constraint(value, shardings.sharding(shardings.by_number(number), place.devices))


def spread(inputs: Sequence[Any], places: Sequence[int], place: placement.Placement) -> Sequence[Any]:
    """The inputs of a program; those that are held whole, because their sizes do not divide, split all the same."""
    if not place.mesh:
        return inputs

    def one(value: Any, number: int) -> Any:
        split = shardings.by_number(number)
        return value if split is None or split.fits(value.shape) else constrained(value, number)

    return [one(value, number) for value, number in zip(inputs, places, strict=True)]
