"""Files: those that a setting names, where one that cannot be written is told of once, and those written in one go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch_xla import _notices
from torch_xla._errors import message


def append(area: str, setting: str, path: str, text: str) -> bool:
    """Appends a text to a file that a setting names; whether it could be written. The area is that of errors."""
    try:
        with open(path, "a") as file:
            file.write(text)
    except OSError as error:
        notify(area, setting, path, error)
        return False
    return True


def notify(area: str, setting: str, path: str, error: OSError) -> None:
    """Tells once for each file that it cannot be written."""
    got = f"{setting}={path!r}, which cannot be written ({error.strerror or error})"
    _notices.notify("file", path, message(area, got, do="name another file; the program goes on"))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A block that writes a file, to the path that it is given, which takes its place only when it is whole.

    Whoever reads the file meanwhile, or after the block has failed or was killed, finds what was there before. What is
    no plain file, such as a pipe, is written as it is.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        yield target
        return
    folder, name = os.path.split(target)
    draft = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        yield draft
        os.replace(draft, target)
    finally:
        if os.path.exists(draft):
            os.unlink(draft)
