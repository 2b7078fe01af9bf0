"""Gives buffers to leaves that are filled with one number, such as those of `torch.zeros`, when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_xla import _bindings
from torch_xla._core.device import shardings, transfer
from torch_xla._errors import GraphFailure, OutOfMemoryError


def provide(graph: _bindings.Graph, places: Sequence[int] = ()) -> None:
    """Gives buffers to those leaves of a graph that are still to be filled with a number.

    `places` are the placement numbers of its leaves, where its program is known. Raises GraphFailure where
    there is no room.
    """
    buffers: list[Any] = []
    placements: list[int] = []
    errors: dict[int, OutOfMemoryError] = {}
    for i, ((shape, dtype), number, line, slot, where) in enumerate(graph.describe_fills()):
        if where == shardings.UNSPECIFIED:
            where = places[slot] if places and slot >= 0 else shardings.REPLICATED
        placements.append(where)
        try:
            buffers.append(transfer.fill(shape, dtype, number, graph.device, line, where))
        except OutOfMemoryError as error:
            errors[i] = error
    if errors:
        first, *others = errors.values()
        for other in others:
            first.add_note(str(other))
        try:
            raise GraphFailure(first, fills=tuple(errors))
        finally:
            del first, others, errors  # they would hold themselves, with the caller's variables
    graph.provide_fills(buffers, placements)
