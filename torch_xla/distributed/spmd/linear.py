"""Linear layers that keep the dimensions of their input apart: a flattened one hides how it is split.

On this device all of them do so; these are names that programs of 2.9 ask for it by.
"""

from __future__ import annotations

import torch


class XLAPatchedLinear:
    """`torch.nn.functional.linear` in the form of an autograd function."""

    apply = staticmethod(torch.nn.functional.linear)


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward function of a linear layer through `XLAPatchedLinear`."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(torch.nn.Linear):
    """A linear layer."""


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """Makes every `torch.nn.Linear` inside a module an `EinsumLinear`, parameters and hooks included."""
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = EinsumLinear
    return module
