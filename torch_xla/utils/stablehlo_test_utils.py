"""For tests of exported modules."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def has_tf_package() -> bool:
    """Whether TensorFlow is installed."""
    return importlib.util.find_spec("tensorflow") is not None


def wrap_func_as_nn_module(f: Callable[..., Any]) -> torch.nn.Module:
    """A function as a module, which is what can be exported.

    Args:
        f: The function.
    """

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return f(*args)

    return Module().eval()
