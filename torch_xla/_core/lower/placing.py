"""Adds sharding constraints to a program where users chose a sharding, so that XLA does not choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from torch_xla._core.device import placement, shardings
from torch_xla._core.graph.graph import Graph
from torch_xla._core.lower.manual_lowering import ENTER, LEAVE

OPERATOR = "xla.place.default"  # gives its argument, in another place


def constrained(value: Any, number: int) -> Any:
    """The value, constrained to the sharding with this placement number."""
    place = placement.of(0)
    if not place.mesh:
        return value
    return jax.lax.with_sharding_constraint(value, shardings.sharding(shardings.by_number(number), place.devices))


def axes_of(graph: Graph) -> shardings.Axes | None:
    """The axes of the user's mesh in a program, where there is one.

    What is computed on parts is so by the number of each device, which is not where a mesh in another order has it.
    """
    asked = [node.args[1] for node in graph.nodes if node.op in (OPERATOR, ENTER, LEAVE)]
    placements = {*graph.leaf_placements, *graph.output_placements, *asked}
    by_number = shardings.MANUAL in placements or any(node.op in (ENTER, LEAVE) for node in graph.nodes)
    axes = shardings.axes_for(placements)
    return None if axes is not None and axes.order and by_number else axes


def spread(inputs: Sequence[Any], places: Sequence[int], place: placement.DeviceSet) -> Sequence[Any]:
    """A program's inputs; those held whole, because their sizes do not divide, get their sharding as a constraint."""
    if not place.mesh:
        return inputs

    def one(value: Any, number: int) -> Any:
        split = shardings.by_number(number)
        return value if split is None or split.fits(value.shape) else constrained(value, number)

    return [one(value, number) for value, number in zip(inputs, places, strict=True)]
