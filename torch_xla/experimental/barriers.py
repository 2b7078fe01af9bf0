"""Barriers that no one wrote: loops without `torch_xla.sync` are cut where they repeat."""

from __future__ import annotations

from torch_xla import _bindings


def auto_barrier(enable: bool) -> None:
    """Switches the search for loops without barriers on or off, for the whole process.

    It is on at the start, unless ``XLA_AUTO_BARRIER=0`` is in the environment. Where the operators of a program repeat
    and no barrier stands between the repetitions, each becomes a graph, as if ``torch_xla.sync()`` stood at the end of
    the loop's body. Nothing changes for a loop with a barrier.

    Args:
        enable: Whether such loops shall be cut.
    """
    _bindings.trace_calls(bool(enable))
