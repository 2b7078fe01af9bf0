"""Checkpoints by step, in the background if wanted, and one more before the process has to go."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import torch_xla
from torch_xla._errors import message
from torch_xla._torch_internals import FsspecReader, FsspecWriter
from torch_xla.core import _preemption
from torch_xla.core import xla_model as xm
from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict
from torch_xla.experimental.distributed_checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner

_FILE = ".manager_metadata"  # in each checkpoint's folder: it is complete


@dataclass(frozen=True)
class _Checkpoint:
    step: int
    saved_at: float  # seconds since 1970


class CheckpointManager:
    """Takes checkpoints of a loop every so many steps, and finds them again.

    Args:
        path: Folder of the checkpoints, a name of any file system that ``fsspec`` knows.
        save_interval: Steps from one checkpoint to the next.
        max_to_keep: How many are kept, the latest; 0 keeps all.
        max_pending_async: How many may wait to be written in the background.
        num_of_threads: Threads that write one.
        process_group: Who takes part; all of the job by default.
        chkpt_on_preemption: Whether one is taken at the next step when the process is asked to end (SIGTERM).

    Raises:
        ValueError: A number is out of range.
        RuntimeError: There is no process group.

    Example::

        manager = CheckpointManager("gs://bucket/run", save_interval=100)
        for step, batch in enumerate(loader):
            ...
            manager.save_async(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})
    """

    def __init__(
        self,
        path: str,
        save_interval: int,
        max_to_keep: int | None = 0,
        max_pending_async: int | None = 1,
        num_of_threads: int | None = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                message("checkpoint", "A process group is required", do="call init_process_group('gloo', …)")
            )
        keep_limit, pending = max_to_keep or 0, 1 if max_pending_async is None else max_pending_async
        if save_interval < 1 or pending < 1 or keep_limit < 0:
            got = f"save_interval={save_interval}, max_pending_async={pending}, max_to_keep={keep_limit}"
            raise ValueError(message("checkpoint", got, expected="positive numbers; max_to_keep may be 0"))
        self.base_path = os.path.join(path, "")
        self.save_interval, self.max_to_keep = save_interval, keep_limit
        self.num_of_threads, self.chkpt_on_preemption = num_of_threads or 1, chkpt_on_preemption
        self.pg = process_group or dist.new_group()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch_xla-checkpoint")
        self._room = threading.Semaphore(pending)
        self._writing = threading.Lock()
        self._started: list[Future[None]] = []
        self._tracked = self._find_tracked()
        if chkpt_on_preemption:
            _preemption.watch()

    def _find_tracked(self) -> list[_Checkpoint]:
        system, root = url_to_fs(self.base_path)
        if not system.exists(root):
            system.mkdirs(root, exist_ok=True)
            return []
        checkpoints, invalid = [], []
        for folder in system.ls(root, detail=False):
            try:
                with system.open(os.path.join(folder, _FILE), "r") as file:
                    checkpoints.append(_Checkpoint(**json.load(file)))
            except (OSError, ValueError, TypeError):
                invalid.append(folder)
        if invalid:
            logging.warning(
                message("checkpoint", f"got incomplete checkpoints {invalid}, which are ignored", do="delete them")
            )
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.saved_at)

    def _folder(self, step: int) -> str:
        return os.path.join(self.base_path, str(step))

    def _delete(self, step: int) -> None:
        if dist.get_rank(self.pg) == 0:
            system, folder = url_to_fs(self._folder(step))
            if system.exists(folder):
                system.rm(folder, recursive=True)

    def _save(self, step: int, state_dict: dict[str, Any]) -> None:
        with self._writing:
            self._delete(step)
            writer = FsspecWriter(self._folder(step), thread_count=self.num_of_threads, per_thread_copy_ahead=0)
            save(state_dict, storage_writer=writer, planner=SPMDSavePlanner(), process_group=self.pg)
            checkpoint = _Checkpoint(step, time.time())
            self._tracked = [*(other for other in self._tracked if other.step != step), checkpoint]
            if dist.get_rank(self.pg) == 0:
                system, folder = url_to_fs(self._folder(step))
                with system.open(os.path.join(folder, _FILE), "w") as file:
                    json.dump(asdict(checkpoint), file)
            while self.max_to_keep and len(self._tracked) > self.max_to_keep:
                self._delete(self._tracked.pop(0).step)

    def should_save(self, step: int) -> bool:
        """Whether a step's turn has come, or the process is asked to end.

        Args:
            step: The step.
        """
        ending = self.chkpt_on_preemption and self.reached_preemption(step)
        if ending:
            logging.warning(message("checkpoint", f"the process was asked to end: taking one at step {step}"))
        return step % self.save_interval == 0 or ending

    def save(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """Takes a checkpoint if its turn has come.

        Args:
            step: The step of the loop.
            state_dict: What to save.
            force: Whether to take it in any case.

        Returns:
            Whether one was taken.
        """
        if not (self.should_save(step) or force):
            return False
        self._compute()
        self._save(step, state_dict)
        return True

    def save_async(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """As `save`, but returns when the values are on the host; they are written in the background.

        An earlier checkpoint that could not be written raises here, and is not tried again.

        Args:
            step: The step of the loop.
            state_dict: What to save.
            force: Whether to take it in any case.

        Returns:
            Whether one is taken.

        Raises:
            Exception: What went wrong with an earlier one.
        """
        self._raise_failures()
        if not (self.should_save(step) or force):
            return False
        self._compute()
        copied = _sharded_cpu_state_dict(state_dict)
        self._room.acquire()
        started = self._pool.submit(self._save, step, copied)
        started.add_done_callback(lambda _: self._room.release())
        self._started.append(started)
        return True

    def _compute(self) -> None:
        torch_xla.sync()
        xm.wait_device_ops()

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Reads a checkpoint into the tensors of a state dict, which keep their splits.

        Args:
            step: Its step.
            state_dict: What to read into.

        Raises:
            ValueError: There is no checkpoint of that step.
        """
        if step not in self.all_steps():
            raise ValueError(message("checkpoint", f"got step {step}", expected=f"one of {self.all_steps()}"))
        reader = FsspecReader(self._folder(step))
        load(state_dict, storage_reader=reader, planner=SPMDLoadPlanner(), process_group=self.pg)

    def all_steps(self) -> list[int]:
        """The steps of which there are checkpoints."""
        return sorted(checkpoint.step for checkpoint in self._tracked)

    def join(self) -> None:
        """Waits for what is written in the background, and raises what went wrong there."""
        wait(self._started)
        self._raise_failures()

    def _raise_failures(self) -> None:
        """Forgets what is written, and raises the first failure of it."""
        done = [future for future in self._started if future.done()]
        self._started = [future for future in self._started if future not in done]
        for future in done:
            future.result()

    def reached_preemption(self, step: int) -> bool:
        """Whether some process was asked to end: the same answer for all of them.

        Args:
            step: The step.
        """
        return _preemption.reached(step, self.pg)
