"""What people are told of their program, once each, by `logging`: on stderr where nobody configured that."""

from __future__ import annotations

import logging
from collections.abc import Hashable

_told: set[tuple[str, Hashable]] = set()


def is_new(kind: str, key: Hashable) -> bool:
    """Whether this was not told yet; from now on it was."""
    if (kind, key) in _told:
        return False
    _told.add((kind, key))
    return True


def was_told(kind: str, key: Hashable) -> bool:
    """Whether this was told."""
    return (kind, key) in _told


def tell(kind: str, key: Hashable, text: str) -> None:
    """Tells something once by key, or each time where that is None, by the logger ``torch_xla.<kind>``.

    The text has its area in front as an error has it, or else this package's name is put there.
    """
    if key is None or is_new(kind, key):
        logging.getLogger(f"torch_xla.{kind}").warning(text if text.startswith("[") else f"torch_xla: {text}")


def forget(kind: str) -> None:
    """Tells all of a kind again."""
    _told.difference_update([notice for notice in _told if notice[0] == kind])
