"""Saving data as one small file plus one file per tensor, which bounds the memory that saving needs."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch

from torch_xla import _files
from torch_xla._core.execute import barrier as _barrier
from torch_xla.core import xla_model as xm


class TensorReference:
    """Stands for a tensor in the small file.

    Args:
        tid: What the name of the tensor's file has of it.
    """

    def __init__(self, tid: int | str) -> None:
        self.tid = tid


def _tensor_file(path: str, tid: int | str) -> str:
    return os.path.join(f"{path}.tensors", f"tensor_{tid}.pt")


def save(data: Any, path: str, master_only: bool = True, global_master: bool = False) -> None:
    """Saves nested containers; the tensors in them go to the folder ``<path>.tensors``, one at a time.

    All processes call this, and it returns when all have been here. What was saved under this name before stays whole
    until the new small file takes its place.

    Args:
        data: Any nesting of containers.
        path: The small file.
        master_only: Whether only the first process writes; otherwise each needs a path of its own.
        global_master: With ``master_only``, whether that is the first process of the job, not of each host.
    """
    writes = not master_only or xm.is_master_ordinal(local=not global_master)
    folder = f"{path}.tensors"
    # Files of another save have other names.
    mark = secrets.token_hex(4)
    if writes:
        os.makedirs(folder, exist_ok=True)

    def store(tensors: list[torch.Tensor]) -> list[TensorReference]:
        _barrier.evaluate(tensors, wait=False)
        references = [TensorReference(f"{number}-{mark}") for number in range(len(tensors))]
        for reference, tensor in zip(references, tensors, strict=True) if writes else ():
            torch.save(tensor.detach().cpu(), _tensor_file(path, reference.tid))
        return references

    arena = xm.ToXlaTensorArena(store, lambda item: isinstance(item, torch.Tensor) and xm.is_xla_tensor(item))
    references = arena.transform(data)
    if writes:
        with _files.replacing(path) as draft:
            torch.save(references, draft)
        for name in os.listdir(folder):
            if not name.endswith(f"-{mark}.pt"):
                os.unlink(os.path.join(folder, name))
    xm.rendezvous("torch_xla.utils.serialization.save")


def load(path: str) -> Any:
    """Loads what `save` wrote, with its tensors on the CPU.

    The small file may hold any Python object: load only files you trust.

    Args:
        path: The small file.
    """

    def read(references: list[TensorReference]) -> list[torch.Tensor]:
        return [torch.load(_tensor_file(path, reference.tid)) for reference in references]

    arena = xm.ToXlaTensorArena(read, lambda item: isinstance(item, TensorReference))
    return arena.transform(torch.load(path, weights_only=False))
