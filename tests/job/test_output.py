"""What is printed while the processes of a job connect."""

from __future__ import annotations

import os

from torch_xla._core.job import connection


def test_only_gloo_is_kept_back() -> None:
    source, sink = os.pipe()
    saved = os.dup(1)
    os.dup2(sink, 1)
    try:
        with connection._silent():
            os.write(1, b"a line of another thread\n[Gloo] Rank 0 is connected\nthe next")
        os.write(1, b" line")
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)
    with os.fdopen(source, "rb") as found:
        assert found.read() == b"a line of another thread\nthe next line"
