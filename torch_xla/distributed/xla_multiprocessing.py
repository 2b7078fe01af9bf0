"""Starting the processes of a job, imported as ``xmp``. This version runs jobs of one process.

Importing it registers backend ``xla`` of `torch.distributed`, as scripts expect that start their processes with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.multiprocessing

from torch_xla._core.device import client
from torch_xla._errors import listing, message
from torch_xla.distributed import xla_backend as xla_backend

T = TypeVar("T")

logger = logging.getLogger("torch_xla")

_START_METHODS = ("spawn", "fork", "forkserver")


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Runs ``fn(index, *args)`` for each process of the job: here, in this process.

    Args:
        fn: Function whose first argument is the ordinal of its process.
        args: Further arguments.
        nprocs: Number of processes: 1, or None for as many as can be used.
        join: Accepted for compatibility.
        daemon: Accepted for compatibility.
        start_method: How `multiprocessing` would start processes.

    Raises:
        NotImplementedError: more than one process was asked for.
        ValueError: ``nprocs`` or ``start_method`` makes no sense.
    """
    if start_method not in _START_METHODS:
        raise ValueError(message("spawn", f"start_method={start_method!r}", expected=listing(_START_METHODS)))
    if nprocs is not None and nprocs < 1:
        raise ValueError(message("spawn", f"nprocs={nprocs}", expected="1 or None"))
    if nprocs is not None and nprocs > 1:
        raise NotImplementedError(
            message(
                "spawn",
                f"nprocs={nprocs}",
                expected="1 or None",
                do="use the devices xla:0, xla:1, … of one process instead",
            )
        )
    if nprocs is None and client.device_count() > 1:
        logger.warning(
            "[spawn] %d devices are visible and one process is started; it may use all of them by index",
            client.device_count(),
        )
    fn(0, *args)


class MpModelWrapper:
    """Holds a model that processes move to their devices one after the other.

    Args:
        model: The model, on the CPU.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._lock = torch.multiprocessing.Lock()

    def to(self, device: Any) -> torch.nn.Module:
        """Moves the model to a device and returns it."""
        with self._lock:
            self._model.to(device)
        return self._model


class MpSerialExecutor:
    """Runs functions in one process at a time, for example to download data once."""

    def __init__(self) -> None:
        self._lock = torch.multiprocessing.Lock()

    def run(self, fn: Callable[[], T]) -> T:
        """Runs a function while no other process does."""
        with self._lock:
            return fn()
