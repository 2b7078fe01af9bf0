"""What a step does that the recorder does not see: modules, optimizers, schedulers, generators on the host."""

from __future__ import annotations

import gc
import random
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_xla._core.replay.call import CannotReplay


def settings_of(optimizers: Sequence[weakref.ref[Optimizer]]) -> tuple[list[Any], list[Any]]:
    """The numbers in the parameter groups of optimizers, and everything else there but the parameters."""
    numbers: list[Any] = []
    others: list[Any] = []
    for reference in optimizers:
        optimizer = reference()
        if optimizer is None:
            others.append(None)
            continue
        for group in optimizer.param_groups:
            others.append(len(group["params"]))
            for name, value in group.items():
                if name == "params":
                    continue
                for x in value if isinstance(value, (tuple, list)) else (value,):
                    if type(x) in (int, float):
                        numbers.append(x)
                    elif isinstance(x, torch.Tensor):
                        others.append(id(x) if x.device.type == "xla" else (id(x), x.tolist()))
                    else:
                        others.append(x)
    return numbers, others


class Watcher:
    """Notes what a step does while it is recorded: modules that are called, optimizers that take a step."""

    def __init__(self) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self._host_state: dict[int, list[tuple[Any, ...]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A scope in which it does."""

        def called(module: torch.nn.Module, _: Any) -> None:
            self.modules.setdefault(id(module), module)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in self.optimizers:
                self.optimizers[id(optimizer)] = optimizer
                _count_on_device(optimizer)
                self._host_state[id(optimizer)] = _host_state(optimizer)

        hooks = [register_module_forward_pre_hook(called), register_optimizer_step_pre_hook(stepped)]
        try:
            with warnings.catch_warnings():  # these hooks may be called for a compiled module too
                warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def counters(self) -> list[torch.Tensor]:
        """Tensors on the host in which optimizers count their steps.

        Raises:
            CannotReplay: One has changed something else there.
        """
        found = []
        for key, optimizer in self.optimizers.items():
            for (name, place, before), (_, _, after) in zip(
                self._host_state[key], _host_state(optimizer), strict=False
            ):
                if before == after:
                    continue
                if place is None or after != before + 1:
                    raise CannotReplay(
                        f"torch.optim.{type(optimizer).__name__} changes '{name}' of its state on the host; use one "
                        "that keeps it on the device, with fused=True or capturable=True"
                    )
                found.append(place)
        return found


_CAN_COUNT_ON_DEVICE = tuple(
    getattr(torch.optim, name) for name in ("Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)


def _count_on_device(optimizer: Optimizer) -> None:
    """Has an optimizer of PyTorch's count its steps on the device, where it can: else each step has other numbers."""
    if not isinstance(optimizer, _CAN_COUNT_ON_DEVICE):
        return
    for group in optimizer.param_groups:
        if group.get("capturable") is not False or group.get("fused"):
            continue
        if not all(p.device.type == "xla" for p in group["params"]):
            continue
        group["capturable"] = True
        group["foreach"] = False  # which PyTorch refuses with it on this device
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for name in ("step", "eta", "mu", "mu_product"):
                value = state.get(name)
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    state[name] = value.to(p.device)


def _host_state(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            continue
        for name, value in state.items():
            if type(value) in (int, float):
                found.append((name, None, value))
            elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
                found.append((name, value, value.item()))
    return found


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[tuple[LRScheduler, int]]:
    """The schedulers of optimizers, with the step that each is at."""
    if not optimizers:
        return []
    known = {id(optimizer) for optimizer in optimizers}
    return [
        (x, x.last_epoch)
        for x in gc.get_objects()
        if issubclass(type(x), LRScheduler) and id(getattr(x, "optimizer", None)) in known
    ]


def host_randomness() -> list[Any]:
    """The states of generators on the host."""
    # At the end of the CPU generator's is the field that counts what devices draw (csrc/device/random).
    found: list[Any] = [random.getstate(), torch.get_rng_state()[:-8].numpy().tobytes()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found.append((name, keys.tobytes(), *rest))
    return found
