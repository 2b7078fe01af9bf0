"""``torch_xla.amp.GradScaler``: `torch.amp.GradScaler` on ``xla``, with two ways to skip a step without a host read."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that float16 gradients do not vanish, and skips the steps whose gradients are not finite.

    PyTorch decides on the host whether a step is skipped, and so waits for the device once a step. An optimizer whose
    ``step`` takes ``found_inf`` (`torch_xla.amp.syncfree`) decides on the device instead, and so does any optimizer
    with ``use_zero_grad``.

    Args:
        init_scale: First scale factor.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps with finite gradients.
        backoff_factor: What the scale is multiplied by after a step with other gradients.
        growth_interval: Number of steps between two growths.
        enabled: Whether to scale.
        use_zero_grad: Run the step with gradients of zero instead of skipping it; momentum and weight decay then still
            change the parameters.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.use_zero_grad = use_zero_grad

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        by_device: dict[torch.device, torch.Tensor] = optimizer_state["found_inf_per_device"]
        first, *others = by_device.values()
        found_inf = first + sum(other.to(first.device) for other in others)
        if "found_inf" in inspect.signature(optimizer.step).parameters:
            kwargs["found_inf"] = found_inf
            return optimizer.step(*args, **kwargs)
        if not self.use_zero_grad:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.masked_fill_(found_inf.to(param.device) != 0, 0.0)
        return optimizer.step(*args, **kwargs)
