"""The operators of `torch.distributed.fsdp.fully_shard`, which PyTorch registers for each device type but ``xla``."""

from __future__ import annotations

from typing import Any

import torch

_library: Any = None


def install() -> None:
    """Registers them; PyTorch defines them when `fully_shard` is first imported, before or after this."""
    global _library
    if _library is None:
        _library = torch.library.Library("fsdp", "IMPL", "XLA")
        for kernel in (all_gather_copy_in, split_with_sizes_copy, chunk_cat, copy_):
            _library.impl(kernel.__name__, kernel)


def all_gather_copy_in(
    inputs: list[torch.Tensor], output: torch.Tensor, sizes: list[int], count: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills a process's part of what is gathered; gives the part and the whole."""
    part = output.narrow(0, count * rank, count)
    torch.ops.aten._foreach_copy_(list(part.split(sizes)), inputs)
    return part, output


def split_with_sizes_copy(tensor: torch.Tensor, sizes: list[int], dim: int = 0, *, out: list[torch.Tensor]) -> None:
    """Copies the parts of a tensor."""
    torch.split_with_sizes_copy(tensor, sizes, dim=dim, out=out)


def chunk_cat(tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    """Copies the first parts of all tensors, then the second ones, and so on."""
    torch.ops.aten._chunk_cat(tensors, dim, num_chunks, out=out)


def copy_(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copies a tensor."""
    tensor.copy_(data)
