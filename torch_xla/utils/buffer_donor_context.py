"""A scope in which programs may write over donated buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_xla.core import _donation


@contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[bool]:
    """A block in which programs for some tensors may write over given buffers too, not only those of barriers.

    Args:
        should_alias: Whether they may.

    Yields:
        What was set before, and is again afterwards.
    """
    before = _donation.everywhere()
    _donation.set_everywhere(should_alias)
    try:
        yield before
    finally:
        _donation.set_everywhere(before)
