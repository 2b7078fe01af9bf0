"""Functions without side effects: traced once per signature, then recorded as one operator per call.

Recording a large module costs time at every step; a pure one need not be recorded again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_xla._core.functions.pure import Pure

_XLA_COMPUTATION_CACHE: dict[Callable[..., Any], Pure] = {}  # of `assume_pure_torch` with `use_cache`


def assume_pure(fn: Callable[..., Any], *, add_rng_seed_argument: bool = False) -> Callable[..., Any]:
    """Makes a function that traces `fn` once for each signature: shapes and dtypes of tensors, and all other arguments.

    Gradients of its tensor arguments are computed as PyTorch does; gradients of gradients are not. While something else
    is traced, and for tensors of other devices, it is `fn` itself.

    Args:
        fn: A function whose results depend on its arguments alone and that writes to none of them. It takes and returns
            any nest of tensors; other arguments must be hashable. Random operators draw new numbers at every call.
        add_rng_seed_argument: Whether the new function takes a keyword argument `rng_seed`, a number or a tensor of one
            integer. Equal seeds give equal random numbers.

    Raises:
        RuntimeError: (at the call) `fn` writes to an argument, or uses a tensor from outside that requires a gradient.
        TypeError: (at the call) An argument is neither a tensor nor hashable, or `rng_seed` is missing.
    """
    pure = Pure(fn, "assume_pure")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return pure(args, kwargs)

    @functools.wraps(fn)
    def call_seeded(*args: Any, rng_seed: int | torch.Tensor, **kwargs: Any) -> Any:
        return pure(args, kwargs, seed=rng_seed)

    return call_seeded if add_rng_seed_argument else call


def assume_pure_torch(func: Callable[..., Any], use_cache: bool = False) -> Callable[..., Any]:
    """`assume_pure` without gradients.

    Args:
        func: As for `assume_pure`.
        use_cache: Whether it is traced once per signature, and not at every call.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        pure = _XLA_COMPUTATION_CACHE.get(func) if use_cache else None
        if pure is None:
            pure = Pure(func, "assume_pure_torch")
            if use_cache:
                _XLA_COMPUTATION_CACHE[func] = pure
        with torch.no_grad():
            return pure(args, kwargs)

    return call


class PureModule(torch.nn.Module):
    """A module whose forward pass has no side effects: traced once per signature and mode (training or not).

    Args:
        module: The module; one that writes to its buffers, as batch normalisation does in training, is refused.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._pure = Pure(self._call, "assume_pure")

    def _call(self, state: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.func.functional_call(self._module, state, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        state = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        modes = tuple(module.training for module in self._module.modules())
        return self._pure((state, args, kwargs), {}, state=modes)
