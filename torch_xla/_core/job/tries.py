"""Tells the tries of a job apart, where one is started anew after a failure, as torchrun does.

Who starts the processes may keep a store for all tries. What those of the last try wrote is there too: Gloo, for one,
would connect to their addresses. So whatever is put into such a store has the name of the try before its key.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from typing import Any

from torch_xla import _config, _notices
from torch_xla._core.job.store import prefix, read
from torch_xla._core.job.waits import until
from torch_xla._errors import JobError, one_line

_PAUSES = (0.001, 0.05)  # seconds between two looks, at first and at most
_agreements: Counter[str] = Counter()


def name_of_try(store: Any, rank: int, world: int, purpose: str) -> str:
    """The name of this try, the same in these processes, which meet for it; "0" where the store is of this try alone.

    Raises JobError where one of them does not come, or the store is gone.
    """
    if not _config.TORCHELASTIC_USE_AGENT_STORE.get():
        return "0"
    if (given := _config.XLA_JOB_TRY.get()) is not None:
        return given
    _agreements[purpose] += 1
    own, place = uuid.uuid4().hex, f"torch_xla/{purpose}/{_agreements[purpose]}"
    agree: _Namer | _Asker = _Asker(store, place, own, rank)
    if rank == 0:
        agree = _Namer(store, place, own, world)
    patience, limit = _config.XLA_COLLECTIVE_PATIENCE.get(), _config.XLA_JOB_START_TIMEOUT.get()
    start = time.monotonic()

    def look() -> str | None:
        if time.monotonic() - start > patience:
            text = f"[job] rank {rank} has waited {patience:.0f} s for {agree.awaited()} to start"
            _notices.notify("job", place, text)
        return agree.look()

    try:
        name = until(look, *_PAUSES, seconds=limit)
    except RuntimeError as error:
        reason = f"whoever started the processes has ended ({one_line(error)})"
        raise JobError(f"[job] rank {rank} waited for {agree.awaited()} to start: {reason}") from None
    if name is None:
        text = f"[job] rank {rank} waited {limit:.0f} s for {agree.awaited()} to start"
        raise JobError(f"{text}; XLA_JOB_START_TIMEOUT sets how long")
    return name


def of_this_try(store: Any, rank: int, world: int, purpose: str) -> Any:
    """The part of a store that only this try uses."""
    return prefix(f"try/{name_of_try(store, rank, world, purpose)}", store)


class _Namer:
    """Rank 0, which names the try, and tells each that asks: a question of the last try is answered to nobody.

    Nothing that the processes are told is the name: torchrun counts the restarts of each host by itself.
    """

    def __init__(self, store: Any, place: str, name: str, world: int) -> None:
        self._store, self._place, self._name = store, place, name
        self._answered = dict.fromkeys(range(1, world), "")  # by ranks that do not know it yet, the latest question

    def look(self) -> str | None:
        for rank, answered in list(self._answered.items()):
            if self._store.check([f"{self._place}/{self._name}/{rank}"]):
                self._store.delete_key(f"{self._place}/{self._answered.pop(rank)}")
            elif (question := read(self._store, f"{self._place}/asks/{rank}") or "") != answered:
                self._store.set(f"{self._place}/{question}", self._name)
                self._answered[rank] = question
        return None if self._answered else self._name

    def awaited(self) -> str:
        return f"rank {', '.join(map(str, self._answered))}"


class _Asker:
    """Another rank, which asks in a name of its own."""

    def __init__(self, store: Any, place: str, question: str, rank: int) -> None:
        self._store, self._place, self._question, self._rank = store, place, question, rank
        self._has_asked = False

    def look(self) -> str | None:
        if not self._has_asked:
            self._store.set(f"{self._place}/asks/{self._rank}", self._question)
            self._has_asked = True
        name = read(self._store, f"{self._place}/{self._question}")
        if name is not None:
            self._store.set(f"{self._place}/{name}/{self._rank}", "")
        return name

    def awaited(self) -> str:
        return "rank 0"
