"""Linear layers that keep the dimensions of their input apart: a flattened one hides how it is split."""

from __future__ import annotations

from typing import Any

import torch


class XLAPatchedLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, which keeps the dimensions of its input apart on this device by itself."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product."""
        if torch.is_autocast_enabled("xla"):
            dtype = torch.get_autocast_dtype("xla")
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(input, weight, bias)
        with torch.autocast("xla", enabled=False):
            return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of those that need one."""
        tensors: list[Any] = [
            t if t is None else t.detach().requires_grad_(needs_grad)
            for t, needs_grad in zip(ctx.saved_tensors, (*ctx.needs_input_grad, False), strict=False)
        ]
        input, weight, bias = tensors
        with torch.enable_grad(), torch.autocast("xla", enabled=False):
            product = torch.nn.functional.linear(input, weight, bias)
        differentiable = [t for t in tensors if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(product, differentiable, grad_outputs))
        gradients = [next(grads) if t is not None and t.requires_grad else None for t in tensors]
        return tuple(gradients[: len(ctx.needs_input_grad)])


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward function of a linear layer through `XLAPatchedLinear`."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(torch.nn.Linear):
    """A linear layer through `XLAPatchedLinear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product."""
        return XLAPatchedLinear.apply(input, self.weight, self.bias)


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """Makes every `torch.nn.Linear` inside a module an `EinsumLinear`, parameters and hooks included."""
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = EinsumLinear
    return module
