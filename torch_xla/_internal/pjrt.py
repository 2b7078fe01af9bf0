"""Functions run by all processes of a job on this host, and what they returned there."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch.multiprocessing.spawn import ProcessRaisedException

from torch_xla._core.job import launcher
from torch_xla.distributed import xla_multiprocessing

R = TypeVar("R")


def spawn(
    fn: Callable[..., Any], nprocs: int | None = None, start_method: str = "spawn", args: tuple[Any, ...] = ()
) -> None:
    """Runs ``fn(index, *args)`` in processes; `torch_xla.distributed.xla_multiprocessing.spawn` has the details."""
    xla_multiprocessing.spawn(fn, args=args, nprocs=nprocs, start_method=start_method)


def run_multiprocess(fn: Callable[..., R], *args: Any, start_method: str = "spawn", **kwargs: Any) -> dict[int, R]:
    """Runs ``fn(*args, **kwargs)`` in one new process per device of this host, which are a job.

    Gives results by ordinal. The function, its arguments and what it returns are pickled: RuntimeError where they
    cannot be sent. Raises what the function raised in the process that failed first, or
    torch.multiprocessing.ProcessExitedException where one was killed, or exited with an error.
    """
    with tempfile.TemporaryDirectory(prefix="torch_xla-results-") as folder:
        call = _Returning(fn, args, kwargs, Path(folder))
        count = launcher.processes_of_host()
        try:
            launcher.run(call, (), count, start_method=start_method, modules=xla_multiprocessing.MODULES)
        except ProcessRaisedException as error:
            raised = Path(folder, f"raised-{error.error_index}")
            if raised.exists():
                raise pickle.loads(raised.read_bytes()) from error
            raise
        # Written by the processes of this call, in a folder that only this user can write to.
        files = sorted(Path(folder).iterdir(), key=lambda file: int(file.name))
        return {int(file.name): pickle.loads(file.read_bytes()) for file in files}


class _Returning:
    """A function of a job that leaves what it returned in a folder."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path) -> None:
        self._fn, self._args, self._kwargs, self._folder = fn, args, kwargs, folder
        # As the launcher names functions that cannot be sent.
        self.__module__ = getattr(fn, "__module__", __name__)
        self.__qualname__ = getattr(fn, "__qualname__", repr(fn))

    def __call__(self, rank: int) -> None:
        try:
            result = self._fn(*self._args, **self._kwargs)
        except Exception as error:
            with suppress(Exception):  # it cannot be pickled: its text arrives all the same
                Path(self._folder, f"raised-{os.environ['LOCAL_RANK']}").write_bytes(pickle.dumps(error))
            raise
        (self._folder / str(rank)).write_bytes(pickle.dumps(result))
