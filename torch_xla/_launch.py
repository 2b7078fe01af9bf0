"""`torch_xla.launch`: a function run by each process of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _config
from torch_xla._errors import message


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Runs ``fn(index, *args)`` for each process of the job.

    Under ``torchrun`` the processes exist already, and ``fn`` is called in this one with its local rank.

    Args:
        fn: Function whose first argument is the index of its process.
        args: Further arguments.
        start_method: How `multiprocessing` would start processes: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        debug_single_process: Whether to stay in this process.

    Raises:
        NotImplementedError: the job has more than one process.
    """
    from torch_xla.distributed import xla_multiprocessing

    if torch.distributed.is_torchelastic_launched():
        if _config.WORLD_SIZE.get() > 1:
            raise NotImplementedError(
                message(
                    "launch",
                    f"torchrun started {_config.WORLD_SIZE.get()} processes",
                    expected="one process",
                    do="use torchrun --nproc-per-node=1, and CPU_NUM_DEVICES for several devices in one process",
                )
            )
        fn(_config.LOCAL_RANK.get(), *args)
        return
    xla_multiprocessing.spawn(fn, args=args, nprocs=1 if debug_single_process else None, start_method=start_method)
