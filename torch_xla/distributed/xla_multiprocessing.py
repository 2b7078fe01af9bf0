"""Starting the processes of a job, imported as ``xmp``.

Importing it registers backend ``xla`` of `torch.distributed`, as scripts expect that start their processes with it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock

from torch_xla._core.device import client, pjrt_plugins
from torch_xla._core.job import launcher, session
from torch_xla._errors import listing, message
from torch_xla.distributed import xla_backend as xla_backend

T = TypeVar("T")
MODULES = (__name__,)  # so that the processes of a job know backend "xla"


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Runs ``fn(index, *args)`` in processes of this host, which are a job; each sees its device as ``xla:0``.

    A single process is this one: nothing is started. Where the environment says that this process is one of several,
    such as one per host of a TPU pod, the processes that they start are one job, and ``index`` counts all of them.

    Args:
        fn: Function whose first argument is the ordinal of its process.
        args: Further arguments.
        nprocs: Number of processes: as many as there are devices by default.
        join: Whether to wait until all have ended.
        daemon: Whether they end with this process.
        start_method: ``"spawn"``, ``"forkserver"`` (both import the main script anew) or ``"fork"``, which copies this
            process and is for notebooks.

    Returns:
        None; PyTorch's context with the processes if they are not waited for.

    Raises:
        ValueError: ``nprocs`` or ``start_method`` makes no sense.
        RuntimeError: This process has used a device and cannot be copied, or ``fn`` cannot be sent to another.
        torch.multiprocessing.ProcessRaisedException: A process raised; the message has its traceback.
        torch.multiprocessing.ProcessExitedException: A process was killed, or exited with an error.
    """
    if start_method not in launcher.START_METHODS:
        raise ValueError(message("spawn", f"start_method={start_method!r}", expected=listing(launcher.START_METHODS)))
    available = launcher.processes_of_host()
    count = available if nprocs is None else nprocs
    if not 1 <= count <= max(available, 1):
        raise ValueError(
            message(
                "spawn",
                f"nprocs={nprocs}",
                expected=f"1 to {available}, the devices of this host",
                do="leave it out, or set CPU_NUM_DEVICES to have more CPU devices",
            )
        )
    if count == 1:
        plugin = pjrt_plugins.find(client.device_type())
        if plugin is not None:
            plugin.configure_single_process()
        fn(session.rank_info().rank, *args)
        return None
    return launcher.run(fn, args, count, join, daemon, start_method, modules=MODULES)


_turns = itertools.count()


class _Turn:
    """A lock of the processes of a job on this host.

    It is known by its number: each process that imports a script makes the same ones, in the same order.
    """

    def __init__(self) -> None:
        self._number = next(_turns)

    def locked(self) -> FileLock:
        """The lock, for a `with`."""
        rank_info = session.rank_info()
        name = f"torch_xla-{os.getuid()}-{rank_info.address or os.getpid()}-{rank_info.port}-{self._number}.lock"
        return FileLock(Path(tempfile.gettempdir()) / name)


class MpModelWrapper:
    """Holds a model that processes move to their devices one after the other.

    Args:
        model: The model, on the CPU.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._turn = _Turn()

    def to(self, device: Any) -> torch.nn.Module:
        """Moves the model to a device and returns it."""
        with self._turn.locked():
            self._model.to(device)
        return self._model


class MpSerialExecutor:
    """Runs functions in one process at a time, for example to download data once."""

    def __init__(self) -> None:
        self._turn = _Turn()

    def run(self, fn: Callable[[], T]) -> T:
        """Runs a function while no other process does."""
        with self._turn.locked():
            return fn()
