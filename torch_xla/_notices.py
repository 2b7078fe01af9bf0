"""Logs notices about the user's program, each once: on stderr if `logging` is not configured.

What does not work, such as a file that cannot be written, is always told. Advice - of a program that works, but could
be faster - is limited by default: two short lines in a process, one of a missing barrier, one of anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from torch_xla import _config, _metrics

_WIDTH = 160
_HINT = " (docs/debugging.md; XLA_NOTICES=all shows all)"
_sent: set[tuple[str, Hashable]] = set()
_lines_left = {"barrier", "other"}


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
    """Logs a notice of what does not work with ``torch_xla.<kind>``, once per key, or each time if that is None.

    The text begins with its area, as an error does, or gets this package's name in front.
    """
    if key is None or is_new(kind, key):
        _log(logging.WARNING, kind, text)


def advise(kind: str, key: Hashable, text: str, brief: str) -> None:
    """Logs advice likewise, as far as ``XLA_NOTICES`` and ``PT_XLA_DEBUG_LEVEL`` ask for it.

    Args:
        kind: The logger's name.
        key: What is told once; None each time.
        text: All of it, for who asked; else it is logged as a detail, with level DEBUG.
        brief: What stands in the short line, which is cut where it is too long.
    """
    if key is not None and not is_new(kind, key):
        return
    _metrics.count("Notices")
    shown = _config.XLA_NOTICES.get()
    if shown == "all" or _config.PT_XLA_DEBUG_LEVEL.get() > 0 or _config.PT_XLA_DEBUG.get():
        _log(logging.WARNING, kind, text)
        return
    _log(logging.DEBUG, kind, text)
    share = "barrier" if kind == "barrier" else "other"
    # Processes of a job run the same program: the first one tells.
    if shown == "few" and share in _lines_left and _config.RANK.get() == 0:
        _lines_left.discard(share)
        room = _WIDTH - len("torch_xla: ") - len(_HINT)
        _log(logging.WARNING, kind, (brief if len(brief) <= room else f"{brief[: room - 1]}…") + _HINT)


def _log(level: int, kind: str, text: str) -> None:
    logging.getLogger(f"torch_xla.{kind}").log(level, text if text.startswith("[") else f"torch_xla: {text}")


def short(line: str | None) -> str:
    """A user's line, ``folder/file.py:3 in function``, as ``file.py:3``."""
    return line.rsplit(" in ", 1)[0].rpartition("/")[2] if line else "an unknown line"


def forget(kind: str) -> None:
    """Makes all notices of a kind new again."""
    _sent.difference_update([notice for notice in _sent if notice[0] == kind])
