"""Lets a script make process groups though the job's other processes are not there.

PyTorch has no registration for it: its stores and groups would listen at a port, and wait for them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

from torch_xla import _torch_internals
from torch_xla._core.device import environment


def install() -> None:
    """Makes PyTorch's own ways to meet find this process alone."""
    store = HashStore()

    def meet(url: str, *_: Any, **__: Any) -> Any:
        info = environment.rank_info()
        yield store, info.rank, info.world

    for scheme in ("env", "tcp", "file"):
        _torch_internals._rendezvous_handlers[scheme] = meet
    # DistributedDataParallel reads what the others say of their shapes, which would be zero.
    private: Any = dist
    private._verify_params_across_processes = lambda *_: None
    distributed_c10d.ProcessGroupGloo = _group  # type: ignore[assignment,misc]


def _group(store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
    return _torch_internals.FakeProcessGroup._create_internal(rank, size)
