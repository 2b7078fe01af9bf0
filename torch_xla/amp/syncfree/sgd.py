"""SGD that skips a step on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.sgd import sgd

from torch_xla.amp.syncfree._overflow import Skipping


class SGD(Skipping, torch.optim.SGD):
    """`torch.optim.SGD` whose step is skipped on the device when gradients are not finite.

    All arguments are those of `torch.optim.SGD`. A step without dampening is one operator for all parameters of a
    group.
    """

    def _update(self, group: dict[str, Any], overflow: torch.Tensor | None) -> None:
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        sparse = self._init_group(group, params, grads, [])
        if sparse:
            raise RuntimeError("`_fused_sgd` does not support sparse gradients")
        buffers = [self._buffer(param) for param in params] if group["momentum"] else []
        if buffers and group["dampening"]:
            self._dampened(group, params, grads, buffers, overflow)
            return
        sgd(
            params,
            grads,
            buffers,  # type: ignore[arg-type]
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=overflow,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )

    def _buffer(self, param: torch.Tensor) -> torch.Tensor:
        """The momentum buffer; it starts at zero, which without dampening equals a first step that sets it."""
        state = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        return state["momentum_buffer"]

    def _dampened(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        buffers: list[torch.Tensor],
        overflow: torch.Tensor | None,
    ) -> None:
        """A step with dampening: the first one that is not skipped, known only on the device, is not dampened."""
        scale = getattr(self, "grad_scale", None)
        for param, raw, buffer in zip(params, grads, buffers, strict=True):
            # An optimizer without this entry has taken its first step.
            step = self.state[param].setdefault("step", torch.ones((), dtype=torch.float32, device=param.device))
            grad = raw if scale is None else raw / scale
            grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * param
            moved = group["momentum"] * buffer + (1 - group["dampening"]) * grad
            moved = torch.where(step == 0, grad, moved)
            new = param - group["lr"] * moved
            if overflow is not None:
                skip = overflow.to(param.device) != 0
                moved, new = torch.where(skip, buffer, moved), torch.where(skip, param, new)
            buffer.copy_(moved)
            param.copy_(new)
            step.add_(1 if overflow is None else 1 - overflow)
