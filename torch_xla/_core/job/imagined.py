"""The connection to a job whose other processes are not there: each does, and gives, what this one does."""

from __future__ import annotations

from torch_xla import _bindings
from torch_xla._core.job.connection import Connection
from torch_xla._core.job.waits import Ranks


class ImaginedConnection(Connection):
    """A connection on devices that are described: a store in memory, meetings without waits, no port."""

    imagined = True

    def join(self) -> None:
        """Meets nobody."""
        _bindings.set_collective_rank(self.rank_info.rank)
        self.group(self.everyone)

    def meet(self, name: str, ranks: Ranks, what: str, payload: bytes = b"") -> list[bytes]:
        """Gives what this process gave, once for each."""
        return [payload] * len(ranks)

    def has_left(self, rank: int) -> str | None:
        """None: they last as long as this one."""
        return None

    def leave(self, failure: BaseException | None = None) -> None:
        """Tells nobody."""
        self.over.set()
