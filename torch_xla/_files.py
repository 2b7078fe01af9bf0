"""Files that a setting names: a file that cannot be written is told of once, and the program goes on."""

from __future__ import annotations

import sys

from torch_xla._errors import message

_told: set[str] = set()


def append(area: str, setting: str, path: str, text: str) -> bool:
    """Appends a text to a file.

    Args:
        area: Who writes, as errors name it.
        setting: Name of the setting that names the file.
        path: The file.
        text: What to append.

    Returns:
        Whether it could be written.
    """
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError as error:
        tell(area, setting, path, error)
        return False
    return True


def tell(area: str, setting: str, path: str, error: OSError) -> None:
    """Tells on stderr, once for each file, that it cannot be written."""
    if path not in _told:
        _told.add(path)
        got = f"{setting}={path!r}, which cannot be written ({error.strerror or error})"
        print(message(area, got, do="name another file; the program goes on"), file=sys.stderr)
