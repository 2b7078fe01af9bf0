"""Policies that say which modules inside a model are wrapped by themselves: PyTorch's own, under their older path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp.wrap import (
    _recursive_wrap,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from torch_xla._errors import message

__all__ = [
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "recursive_wrap",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap_inside",
]


def recursive_wrap(
    module: torch.nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., torch.nn.Module],
    ignored_modules: set[torch.nn.Module],
    ignored_params: set[torch.nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[torch.nn.Module, int]:
    """Wraps the modules inside a module that a policy names, from the inside out.

    Args:
        module: The module, changed in place.
        auto_wrap_policy: Called with ``module``, ``recurse`` and the number of parameters not wrapped yet.
        wrapper_cls: Called with a module and ``kwargs``.
        ignored_modules: Modules that are left alone.
        ignored_params: Parameters that do not count.
        only_wrap_children: Whether the module itself is left as it is.
        **kwargs: Options of the wrapper.

    Returns:
        The module or its wrapper, and the number of parameters that are now wrapped.
    """
    return _recursive_wrap(
        module,
        auto_wrap_policy=auto_wrap_policy,
        wrapper_cls=wrapper_cls,
        ignored_modules=ignored_modules,
        ignored_params=ignored_params,
        only_wrap_children=only_wrap_children,
        **kwargs,
    )


def wrap_inside(
    module: torch.nn.Module,
    auto_wrap_policy: Callable[..., bool],
    auto_wrapper_callable: Callable[..., torch.nn.Module] | None,
    wrapper_cls: type[torch.nn.Module],
    options: dict[str, Any],
) -> None:
    """Wraps modules inside a module, none of which may be wrapped yet.

    Args:
        module: The module; it is not wrapped itself.
        auto_wrap_policy: See `recursive_wrap`.
        auto_wrapper_callable: What wraps them, if it is not the class.
        wrapper_cls: The class of the wrappers.
        options: Options of the wrappers.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, wrapper_cls):
            raise ValueError(
                message("fsdp", f"{name} is a {wrapper_cls.__name__}", do="leave auto_wrap_policy or the wrapper out")
            )
    made_by = auto_wrapper_callable or wrapper_cls
    recursive_wrap(module, auto_wrap_policy, made_by, set(), set(), only_wrap_children=True, **options)
