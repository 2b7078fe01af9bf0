"""Optimizers that skip a step on the device when its gradients are not finite, without the host looking at them.

All arguments are those of the PyTorch optimizers of the same names. A step is one operator for all parameters of a
group, but for SGD with dampening.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam as adam_update
from torch.optim.sgd import sgd as sgd_update

__all__ = ["SGD", "Adam", "AdamW"]


class _Skipping:
    """The common base of the optimizers here; it comes before PyTorch's class."""

    param_groups: list[dict[str, Any]]

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)  # type: ignore[call-arg]
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None) -> Any:
        """Updates the parameters, unless the gradients are said not to be finite.

        Args:
            closure: Computes the loss again.
            found_inf: 0-d tensor; the step is skipped where it is not 0. `torch.amp.GradScaler` provides it.

        Returns:
            The closure's loss.

        Raises:
            ValueError: ``found_inf`` has dimensions.
        """
        overflow = getattr(self, "found_inf", None) if found_inf is None else found_inf
        if overflow is not None:
            if overflow.shape:
                raise ValueError("The found_inf tensor has to be scalar type")
            overflow = (overflow != 0).to(torch.float32)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, {"grad_scale": getattr(self, "grad_scale", None), "found_inf": overflow})
        return loss

    def _update(self, group: dict[str, Any], amp: dict[str, Any]) -> None:
        """Updates the parameters of a group where `found_inf` is not 1."""
        raise NotImplementedError


class Adam(_Skipping, torch.optim.Adam):
    """`torch.optim.Adam` whose step is skipped on the device when gradients are not finite."""

    def _update(self, group: dict[str, Any], amp: dict[str, Any]) -> None:
        group["capturable"] = True  # the step number is a tensor on the device
        lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        params, grads, means, squares, largest, steps = lists
        for i, (param, step) in enumerate(zip(params, steps, strict=True)):
            if step.device != param.device:  # the state of an optimizer that counted on the host
                steps[i] = self.state[param]["step"] = step.to(param.device, torch.float32)
        beta1, beta2 = group["betas"]
        names = ("decoupled_weight_decay", "amsgrad", "lr", "weight_decay", "eps", "maximize")
        options = {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2, "fused": True} | amp
        adam_update(params, grads, means, squares, largest, steps, **options)


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` whose step is skipped on the device when gradients are not finite."""


class SGD(_Skipping, torch.optim.SGD):
    """`torch.optim.SGD` whose step is skipped on the device when gradients are not finite."""

    def _update(self, group: dict[str, Any], amp: dict[str, Any]) -> None:
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        if self._init_group(group, params, grads, []):
            raise RuntimeError("`_fused_sgd` does not support sparse gradients")
        buffers = [self._buffer(param) for param in params] if group["momentum"] else []
        if buffers and group["dampening"]:
            self._dampened(group, params, grads, buffers, **amp)
            return
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        sgd_update(params, grads, buffers, fused=True, **{name: group[name] for name in names}, **amp)  # type: ignore[arg-type]

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
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """A step with dampening: the first one that is not skipped, known only on the device, is not dampened."""
        for param, raw, buffer in zip(params, grads, buffers, strict=True):
            # An optimizer without this entry has taken its first step.
            step = self.state[param].setdefault("step", torch.ones((), dtype=torch.float32, device=param.device))
            grad = raw if grad_scale is None else raw / grad_scale
            grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * param
            moved = group["momentum"] * buffer + (1 - group["dampening"]) * grad
            moved = torch.where(step == 0, grad, moved)
            new = param - group["lr"] * moved
            if found_inf is not None:
                skip = found_inf.to(param.device) != 0
                moved, new = torch.where(skip, buffer, moved), torch.where(skip, param, new)
            buffer.copy_(moved)
            param.copy_(new)
            step.add_(1 if found_inf is None else 1 - found_inf)
