"""Adam that skips a step on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam

from torch_xla.amp.syncfree._overflow import Skipping


class Adam(Skipping, torch.optim.Adam):
    """`torch.optim.Adam` whose step is skipped on the device when gradients are not finite.

    All arguments are those of `torch.optim.Adam`. A step is one operator for all parameters of a group.
    """

    def _update(self, group: dict[str, Any], overflow: torch.Tensor | None) -> None:
        group["capturable"] = True  # the step number is a tensor on the device
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        means: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        largest: list[torch.Tensor] = []
        steps: list[torch.Tensor] = []
        self._init_group(group, params, grads, means, squares, largest, steps)
        for i, (param, step) in enumerate(zip(params, steps, strict=True)):
            if step.device != param.device:  # the state of an optimizer that counted on the host
                steps[i] = self.state[param]["step"] = step.to(param.device, torch.float32)
        adam(
            params,
            grads,
            means,
            squares,
            largest,
            steps,
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=overflow,
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
