"""Imports what the processes of a job need, once, in the process they are forked from; starts no client."""

from __future__ import annotations

import torch
import torch.distributed

from torch_xla._core.execute import pipeline  # noqa: F401
from torch_xla.ops import call, collective  # noqa: F401

call.load_rules()
# PyTorch registers its shape functions at the first call that needs one, which takes a while; every process of the job
# would pay for it at its first operator.
(torch.empty(2, device="meta") * 2).sum()
