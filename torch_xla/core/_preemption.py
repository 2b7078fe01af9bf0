"""Whether a process is asked to end: a machine that is taken away says so by SIGTERM, some time before."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_requested = threading.Event()
_before: Any = None
_watching = False


def watch() -> None:
    """Takes notice of SIGTERM from now on, instead of ending; only the main thread can ask for it."""
    global _before, _watching
    if not _watching and threading.current_thread() is threading.main_thread():
        _before = signal.signal(signal.SIGTERM, _note)
        _watching = True


def unwatch() -> None:
    """Restores the SIGTERM handler."""
    global _watching
    if _watching:
        signal.signal(signal.SIGTERM, _before)
        _watching = False
    _requested.clear()


def _note(number: int, frame: FrameType | None) -> None:
    _requested.set()


def reached(step: int, group: dist.ProcessGroup | None = None) -> bool:
    """Whether some process was asked to end by this step of the loop: all that ask get the same answer.

    The group is who asks; all processes of the job by default.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _requested.is_set()
    flag = torch.tensor(_requested.is_set(), dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)
