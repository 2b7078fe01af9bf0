"""PyTorch's defaults, which are of the process's accelerator: where xla is meant and is not that, a line says so."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_xla import _notices
from torch_xla._core.torch import default_accelerator
from torch_xla._errors import message


def install() -> None:
    """Makes PyTorch's functions return the xla device; they do not ask the backend. Does nothing the second time."""
    default_accelerator.know_pinning()
    make = distributed_c10d.init_process_group
    if hasattr(make, "_asks_for_accelerator"):
        return

    @functools.wraps(make)
    def init_process_group(*args: Any, **options: Any) -> None:
        device = options.get("device_id")
        if device is not None and not _is_accelerator(device):
            raise ValueError(
                message(
                    "process group", f"got device_id={device}, which is no accelerator's", do=default_accelerator.HOW
                )
            )
        make(*args, **options)

    init_process_group._asks_for_accelerator = True  # type: ignore[attr-defined]
    distributed_c10d.init_process_group = dist.init_process_group = init_process_group


def check_mesh(device_type: str) -> None:
    """Tells of a mesh of the host where the processes are xla's; raises where `fully_shard` makes it by itself."""
    if device_type == "cpu" and not default_accelerator.on() and dist.is_initialized() and dist.get_backend() == "xla":
        frame = inspect.currentframe()  # nothing else tells a mesh of PyTorch's own from one that a program makes
        while frame is not None and frame.f_code.co_name != "_init_default_mesh":
            frame = frame.f_back
        if frame is None:
            text = (
                "[device mesh] got a mesh of the CPU in a job of xla: for xla, name it, or " + default_accelerator.HOW
            )
            _notices.notify("device_mesh", "cpu", text)
        else:
            got = "got no mesh, and PyTorch's default is one of the process's accelerator"
            do = f"give mesh=init_device_mesh('xla', (world_size,)); or {default_accelerator.HOW}"
            raise RuntimeError(message("fully_shard", got, do=do))


def _is_accelerator(device: torch.device | int) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and (isinstance(device, int) or device.type == current.type)
