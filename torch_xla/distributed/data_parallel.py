"""One copy of a model per device of this process, each in a thread: the oldest way to use several devices."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import torch

from torch_xla import _api, _bindings
from torch_xla._errors import message
from torch_xla.core import xla_model as xm
from torch_xla.core._replicas import ReplicaError, Replicas
from torch_xla.distributed import parallel_loader


class Context:
    """The state of a loop function over the epochs.

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


class _WholeRounds:
    """The batches of a loader without those of a last round that not every device gets one of."""

    def __init__(self, loader: Any, devices: int) -> None:
        self._loader, self._devices = loader, devices

    def __len__(self) -> int:
        return len(self._loader) // self._devices * self._devices

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while len(group := list(itertools.islice(batches, self._devices))) == self._devices:
            yield from group


class DataParallel:
    """Runs a loop over a loader on each device.

    In the loop, `torch_xla.core.xla_model.optimizer_step` averages gradients over the devices; all of them take as many
    steps. Batches are dealt out in turn, those of a last round that is not full to nobody.

    Args:
        network: A module, or a function that makes one.
        device_ids: The devices, or an empty list to stay where the module is. By default the current device.
        **kwargs: Options of `torch_xla.distributed.parallel_loader.ParallelLoader`.
    """

    def __init__(
        self,
        network: torch.nn.Module | Callable[[], torch.nn.Module],
        device_ids: Iterable[str | torch.device] | None = None,
        **kwargs: Any,
    ) -> None:
        module = network if isinstance(network, torch.nn.Module) else network()
        device_names = [str(xm.xla_device())] if device_ids is None else [str(device) for device in device_ids]
        if len(set(device_names)) < len(device_names):
            raise ValueError(message("data_parallel", f"got device_ids={device_names}", expected="each device once"))
        self._native = not device_names
        if self._native:
            device_names = sorted({str(param.device) for param in module.parameters()}) or ["cpu"]
            if len(device_names) > 1:
                raise RuntimeError(
                    message(
                        "data_parallel",
                        f"got parameters on {device_names}",
                        expected="one device",
                        do="move the module",
                    )
                )
        self._devices = device_names
        self._models = [module if self._native else copy.deepcopy(module).to(device) for device in device_names]
        self._contexts = [Context(torch.device(device)) for device in device_names]
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

        Raises:
            Exception: What the first loop that failed has raised; the others are stopped.
        """
        if self._native:
            device = torch.device(self._devices[0])
            return [loop_fn(self._models[0], enumerate(loader), device, self._contexts[0], **kwargs)]
        batches = _WholeRounds(loader, len(self._devices))
        source = parallel_loader.ParallelLoader(batches, self._devices, batchdim=batchdim, **self._kwargs)
        replicas = Replicas([context.device for context in self._contexts])

        def run(place: int) -> Any:
            context = self._contexts[place]
            _bindings.set_current_device(_api.index_of(context.device))
            with replicas.joined(place):
                try:
                    batches = self._batches(source, context.device)
                    return loop_fn(self._models[place], batches, context.device, context, **kwargs)
                except BaseException:
                    source.close()  # nobody waits for batches any more
                    raise

        try:
            with futures.ThreadPoolExecutor(len(self._devices)) as pool:
                runs = [pool.submit(run, place) for place in range(len(self._devices))]
                futures.wait(runs)
                errors = [error for run in runs if (error := run.exception()) is not None]
                for error in sorted(errors, key=lambda error: isinstance(error, ReplicaError)):
                    raise error  # what a loop has raised by itself, before what that did to the others
                return [run.result() for run in runs]
        finally:
            source.close()

    def _batches(self, source: parallel_loader.ParallelLoader, device: torch.device) -> Iterable[Any]:
        return source.per_device_loader(device)
