"""What of a long table a commit tests: the commits take turns, and `make test-sweep` takes all."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@functools.cache
def turn() -> str:
    """The commit that is tested, or what `TEST_TURN` says instead; the same in all processes of a run."""
    if "TEST_TURN" not in os.environ:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            os.environ["TEST_TURN"] = done.stdout.strip()
        except OSError:  # an sdist, where there need be no git
            os.environ["TEST_TURN"] = ""
    return os.environ["TEST_TURN"]


def number(name: str) -> int:
    """A number for something's turn, evenly spread."""
    return int.from_bytes(hashlib.sha256(f"{turn()} {name}".encode()).digest()[:8], "little")


def is_next(name: str, of: int) -> bool:
    """Whether it is something's turn, which it is once in so many commits."""
    return number(name) % of == 0


def pick(name: str, among: Sequence[T]) -> T:
    """One of several, for something named."""
    return among[number(name) % len(among)]
