"""`torch_xla.launch`: a function run by each process of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _config


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Runs ``fn(index, *args)`` in one process per device of this host.

    Under ``torchrun`` the processes exist already, and ``fn`` is called in this one with its local rank.

    Args:
        fn: Function whose first argument is the index of its process.
        args: Further arguments.
        start_method: How processes are started; see `torch_xla.distributed.xla_multiprocessing.spawn`.
        debug_single_process: Whether to stay in this process.

    Raises:
        RuntimeError: This process has used a device and cannot be copied, or ``fn`` cannot be sent to another.
        torch.multiprocessing.ProcessRaisedException: A process raised; the message has its traceback.
        torch.multiprocessing.ProcessExitedException: A process was killed, or exited with an error.
    """
    from torch_xla.distributed import xla_multiprocessing

    if torch.distributed.is_torchelastic_launched():
        fn(_config.LOCAL_RANK.get(), *args)
        return
    xla_multiprocessing.spawn(fn, args=args, nprocs=1 if debug_single_process else None, start_method=start_method)
