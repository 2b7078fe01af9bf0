"""What a step does that neither the recorder nor the guards see: optimizers' counts, generators on the host."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

_ABOUT = ("__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_complex", "element_size", "__len__")


class Optimizers:
    """The optimizers that take a step while one is recorded; they count on the device from then on, where they can."""

    def __init__(self) -> None:
        self.found: dict[int, Optimizer] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A scope in which they are noted."""

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in self.found:
                self.found[id(optimizer)] = optimizer
                _count_on_device(optimizer)

        hook = register_optimizer_step_pre_hook(stepped)
        try:
            yield
        finally:
            hook.remove()


# Those that PyTorch lets count on xla.
_CAN_COUNT_ON_DEVICE = tuple(
    getattr(torch.optim, name) for name in ("Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)


def _count_on_device(optimizer: Optimizer) -> None:
    """Has an optimizer count its steps on the device, where it can: else each step has other numbers."""
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
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    state[name] = value.to(p.device)


class HostArguments(TorchFunctionMode):
    """Notes which tensors on the host, among the arguments of a step, are more than copied to the device.

    Args:
        tensors: Those arguments.
        recording: Of the step, which sees copies.
    """

    def __init__(self, tensors: list[torch.Tensor], recording: Any) -> None:
        super().__init__()
        self._tensors = tensors
        self._recording = recording
        self.computed: str | None = None  # what with

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes one call."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not any(self._has(x) for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        before = len(self._recording.uploads)
        found = func(*args, **kwargs)
        described = name in _ABOUT and not isinstance(found, torch.Tensor)
        if not described and len(self._recording.uploads) == before:
            self.computed = name
        return found

    def _has(self, x: Any) -> bool:
        if isinstance(x, (list, tuple)):
            return any(self._has(y) for y in x)
        if isinstance(x, dict):
            return any(self._has(y) for y in x.values())
        return any(x is t for t in self._tensors)


def host_randomness() -> list[Any]:
    """The states of generators on the host."""
    # At the end of the CPU generator's is the field that counts what devices draw (csrc/device/random).
    found: list[Any] = [random.getstate(), torch.get_rng_state()[:-8].numpy().tobytes()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found.append((name, keys.tobytes(), *rest))
    return found
