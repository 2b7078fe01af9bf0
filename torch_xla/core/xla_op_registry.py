"""Operators whose lowering is a Python function over `xla_builder.Op` values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_xla._core.functions import jax_functions
from torch_xla._torch_internals import pytree
from torch_xla.core import xla_builder as xb


class Op:
    """An operator on xla tensors.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, opfn: Callable[..., Any]) -> None:
        self.name = name
        self._function = opfn
        self._computations: dict[Any, xb.Computation] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call.

        Args:
            *args: Tensors on one XLA device.
            **kwargs: Hashable values, or nests of them, for the function; other values make another program.

        Returns:
            A tensor, or a list of them where the function returns a tuple.
        """
        leaves, structure = pytree.tree_flatten(kwargs)
        key = (jax_functions.metas_of(args), structure, tuple(map(jax_functions.constant, leaves)))
        computation = self._computations.get(key)
        if computation is None:
            shapes = xb.tensor_shape(args)
            computation = self._computations[key] = xb.create_computation(self.name, self._function, shapes, **kwargs)
        results = jax_functions.call(computation.name, args)
        return results if computation.tuple_result and len(results) > 1 else results[0]


def register(name: str, opfn: Callable[..., Any]) -> Op:
    """Makes an operator of a function over ops.

    Args:
        name: Its name in dumps and profiles.
        opfn: Takes an `xla_builder.Op` per tensor, and the keyword arguments of the call; returns one, or a tuple.
    """
    return Op(name, opfn)
