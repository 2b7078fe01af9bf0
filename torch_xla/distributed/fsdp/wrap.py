"""Policies that say which modules inside a model are wrapped by themselves, and the wrapping.

A policy is called with a module, whether the question is to go on inside it or to wrap it, and the number of its
parameters that are not wrapped yet; PyTorch's own policies are called alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy

from torch_xla._errors import message

# What `size_based_auto_wrap_policy` never wraps, and what it never goes into.
EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}
FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}


class Wrapping(nn.Module):
    """A module around another one, whose attributes and items it has too; ``_inside`` is that one's name here."""

    _inside: str

    @property
    def module(self) -> nn.Module:
        """The module inside."""
        inner: nn.Module = getattr(self, self._inside)
        return inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self._inside), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps the modules for which a function says so.

    Args:
        module: The module.
        recurse: Whether the question is to go on inside it.
        unwrapped_params: Number of its parameters that are not wrapped yet.
        lambda_fn: The function.
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wraps the modules of some classes.

    Args:
        module: The module.
        recurse: Whether the question is to go on inside it.
        unwrapped_params: Number of its parameters that are not wrapped yet.
        transformer_layer_cls: The classes.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps modules with many parameters.

    Args:
        module: The module.
        recurse: Whether the question is to go on inside it.
        unwrapped_params: Number of its parameters that are not wrapped yet.
        min_num_params: What counts as many.
        force_leaf_modules: Classes of modules that it does not go into; `FORCE_LEAF_MODULES` by default.
        exclude_wrap_modules: Classes of modules that are not wrapped; `EXCLUDE_WRAP_MODULES` by default.
    """
    leaves = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return unwrapped_params >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wraps the modules inside a module that a policy names, from the inside out.

    Args:
        module: The module, changed in place.
        auto_wrap_policy: The policy.
        wrapper_cls: Called with a module and ``kwargs``.
        ignored_modules: Modules that are left alone.
        ignored_params: Parameters that do not count.
        only_wrap_children: Whether the module itself is left as it is.
        **kwargs: Options of the wrapper.

    Returns:
        The module or its wrapper, and the number of parameters that are now wrapped.
    """
    count = sum(param.numel() for param in module.parameters() if param not in ignored_params)
    if not auto_wrap_policy(module, True, count):
        return module, 0
    wrapped = 0
    for name, child in module.named_children():
        if child not in ignored_modules:
            wrapped_child, inside = recursive_wrap(
                child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
            )
            setattr(module, name, wrapped_child)
            wrapped += inside
    if only_wrap_children or not auto_wrap_policy(module, False, count - wrapped):
        return module, wrapped
    return wrapper_cls(module, **{**kwargs, **getattr(module, "_wrap_overrides", {})}), count


def wrap_inside(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    auto_wrapper_callable: Callable[..., nn.Module] | None,
    wrapper_cls: type[nn.Module],
    options: dict[str, Any],
) -> None:
    """Wraps modules inside a module, none of which may be wrapped yet.

    Args:
        module: The module; it is not wrapped itself.
        auto_wrap_policy: The policy.
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
