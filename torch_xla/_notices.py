"""Logs notices about the user's program, each once: on stderr if `logging` is not configured."""

from __future__ import annotations

import logging
from collections.abc import Hashable

_sent: set[tuple[str, Hashable]] = set()


def is_new(kind: str, key: Hashable) -> bool:
    """Whether a notice was not sent yet; marks it as sent."""
    if (kind, key) in _sent:
        return False
    _sent.add((kind, key))
    return True


def was_sent(kind: str, key: Hashable) -> bool:
    """Whether a notice was sent."""
    return (kind, key) in _sent


def notify(kind: str, key: Hashable, text: str) -> None:
    """Logs a notice with ``torch_xla.<kind>``, once per key, or each time if that is None.

    The text begins with its area, as an error does, or gets this package's name in front.
    """
    if key is None or is_new(kind, key):
        logging.getLogger(f"torch_xla.{kind}").warning(text if text.startswith("[") else f"torch_xla: {text}")


def forget(kind: str) -> None:
    """Makes all notices of a kind new again."""
    _sent.difference_update([notice for notice in _sent if notice[0] == kind])
