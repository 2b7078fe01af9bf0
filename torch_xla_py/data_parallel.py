"""`torch_xla.distributed.data_parallel` as it was first: loops get the number of each batch with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_xla.distributed import data_parallel, parallel_loader
from torch_xla.distributed.data_parallel import Context as Context


class DataParallel(data_parallel.DataParallel):
    """`torch_xla.distributed.data_parallel.DataParallel`, whose loaders give pairs of a number and a batch."""

    def _batches(self, source: parallel_loader.ParallelLoader, device: torch.device) -> Iterable[Any]:
        return enumerate(super()._batches(source, device))
