"""One copy of a model per device of this process, each in a thread: the oldest way to use several devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla.core import xla_model as xm
from torch_xla.distributed import parallel_loader


class Context:
    """What a loop function keeps from one epoch to the next.

    Args:
        device: Its device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def getattr_or(self, name: str, defval: Any) -> Any:
        """An attribute; where it is missing or None it becomes ``defval``, or what that returns if it can be called."""
        if getattr(self, name, None) is None:
            setattr(self, name, defval() if callable(defval) else defval)
        return getattr(self, name)


class DataParallel:
    """Runs a loop over a loader on each device. Gradients are averaged over processes, of which there is one.

    Args:
        network: A module, or a function that makes one.
        device_ids: The devices: one, or an empty list to stay where the module is. By default the current device.
        **kwargs: Options of `torch_xla.distributed.parallel_loader.ParallelLoader`.

    Raises:
        NotImplementedError: several devices were given: nothing would average their gradients.
    """

    def __init__(
        self,
        network: torch.nn.Module | Callable[[], torch.nn.Module],
        device_ids: Iterable[str | torch.device] | None = None,
        **kwargs: Any,
    ) -> None:
        module = network if isinstance(network, torch.nn.Module) else network()
        wanted = [str(xm.xla_device())] if device_ids is None else [str(device) for device in device_ids]
        if len(wanted) > 1:
            raise NotImplementedError(
                message("data_parallel", f"device_ids={wanted}", expected="one device", do="choose one of them")
            )
        self._native = not wanted
        if self._native:
            wanted = sorted({str(param.device) for param in module.parameters()}) or ["cpu"]
            if len(wanted) > 1:
                raise RuntimeError(message("data_parallel", f"parameters on {wanted}", expected="one device"))
        self._devices = wanted
        self._models = [module if self._native else copy.deepcopy(module).to(device) for device in wanted]
        self._contexts = [Context(torch.device(device)) for device in wanted]
        self._kwargs = kwargs

    @property
    def devices(self) -> list[str]:
        """Names of the devices."""
        return self._devices

    @property
    def models(self) -> list[torch.nn.Module]:
        """The copies of the module."""
        return self._models

    def __call__(self, loop_fn: Callable[..., Any], loader: Iterable[Any], batchdim: int = 0, **kwargs: Any) -> Any:
        """Runs ``loop_fn(model, device_loader, device, context, **kwargs)``; returns the list of results.

        Args:
            loop_fn: The loop.
            loader: The batches.
            batchdim: Dimension that holds the batch.
            **kwargs: Further arguments of the loop.
        """
        if self._native:
            device = torch.device(self._devices[0])
            return [loop_fn(self._models[0], enumerate(loader), device, self._contexts[0], **kwargs)]
        source = parallel_loader.ParallelLoader(loader, self._devices, batchdim=batchdim, **self._kwargs)
        try:
            with futures.ThreadPoolExecutor(len(self._devices)) as pool:
                runs = [
                    pool.submit(loop_fn, model, source.per_device_loader(device), context.device, context, **kwargs)
                    for model, device, context in zip(self._models, self._devices, self._contexts, strict=True)
                ]
                return [run.result() for run in runs]
        finally:
            source.close()
