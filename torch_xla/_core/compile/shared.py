"""Compiles once for a job: of the processes that are about to compile a program one does, the others load it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch_xla._core.job import session
from torch_xla._core.job.connection import Connection
from torch_xla._core.job.waits import until

T = TypeVar("T")

_published: deque[str] = deque()  # keys of the programs of this process in the store

_LARGEST = 1 << 28  # bytes that the store is given
_KEPT = 8  # programs of this process that stay in the store: of a job's ranks few come much later, or never
_PAUSES = (0.001, 0.05)  # seconds between two looks, at first and at most


def once(what: bytes, compile: Callable[[], T], serialized: Callable[[T], bytes], loaded: Callable[[bytes], T]) -> T:
    """Gets a program from whoever of the job compiles it, or compiles it for all; `what` is all that decides it.

    `serialized` makes bytes of what was compiled, `loaded` makes it of these bytes.
    """
    connection = session.connected()
    if connection is None or connection.imagined or connection.stopped is not None:
        return compile()
    key = f"program/{hashlib.sha256(what).hexdigest()}"
    try:
        store = connection.store
        who = int(store.compare_set(key, "", str(connection.rank_info.rank)))
        payload = b"" if who == connection.rank_info.rank else _fetch_compiled(connection, store, key, who)
    except RuntimeError:  # the store is gone, as the watch is about to say
        return compile()
    if payload:
        with suppress(Exception):  # whatever XLA objects to: it compiles anew
            return loaded(payload)
    if who != connection.rank_info.rank:
        return compile()
    program_bytes = b""
    try:
        program = compile()
        with suppress(Exception):  # not every executable has such a form
            program_bytes = serialized(program)
        return program
    finally:
        with suppress(RuntimeError):
            store.set(f"{key}/made", program_bytes if len(program_bytes) <= _LARGEST else b"")
            _published.append(key)
            if len(_published) > _KEPT:
                store.set(f"{_published.popleft()}/made", b"")  # who comes now compiles it


def _fetch_compiled(connection: Connection, store: Any, key: str, who: int) -> bytes:
    """The executable that another process compiled; empty if it failed."""

    def made() -> bytes | None:
        if store.check([f"{key}/made"]):
            return bytes(store.get(f"{key}/made"))
        return None if connection.stopped is None and connection.has_left(who) is None else b""

    payload = until(made, *_PAUSES)
    if not payload:
        return b""
    if store.add(f"{key}/loaded", 1) == len(connection.everyone) - 1:
        store.set(f"{key}/made", b"")  # all have it
    return payload
