"""How `torch.distributed` finds its processes with ``init_method="xla://"``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from torch_xla import runtime
from torch_xla._core.job import session


def pjrt_rendezvous_handler(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Gives store, rank and world size of the job; with one process the store needs no port."""
    connection = session.connection()
    store = HashStore() if connection is None else PrefixStore("torch.distributed", connection.new_store())
    yield store, runtime.global_ordinal(), runtime.world_size()
