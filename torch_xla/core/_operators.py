"""Operators of XLA that PyTorch has no name for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torch_xla._core.functions import jax_functions
from torch_xla._errors import message


@functools.lru_cache(maxsize=1024)
def _dot_general_program(metas: tuple[Any, ...], dimensions: Any, preferred: torch.dtype | None) -> str:
    from jax import lax

    from torch_xla.ops import dtypes

    kind = None if preferred is None else dtypes.numpy_dtype(preferred)

    def function(lhs: Any, rhs: Any) -> list[Any]:
        return [lax.dot_general(lhs, rhs, dimensions, preferred_element_type=kind)]

    return jax_functions.trace(function, metas, "dot_general")


def dot_general(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    dimension_numbers: Sequence[Any],
    precision_config: Any = None,
    preferred_element_type: torch.dtype | None = None,
) -> torch.Tensor:
    """XLA's DotGeneral, without gradients.

    Args:
        lhs: A tensor on an XLA device.
        rhs: Another on the same.
        dimension_numbers: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``; the second pair may be
            empty.
        precision_config: Must be None.
        preferred_element_type: Type of the result; that of the arguments by default.

    Raises:
        ValueError: The dimensions are not two pairs, or a precision is given.
    """
    if precision_config is not None:
        raise ValueError(message("dot_general", f"got precision_config={precision_config!r}", expected="None"))
    if len(dimension_numbers) != 2 or len(dimension_numbers[0]) != 2 or len(dimension_numbers[1]) not in (0, 2):
        raise ValueError(
            message(
                "dot_general",
                f"got dimension_numbers={dimension_numbers!r}",
                expected="((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))",
            )
        )
    contracting, batch = (
        tuple(tuple(d % t.dim() for d in dims) for dims, t in zip(pair, (lhs, rhs), strict=False))
        for pair in dimension_numbers
    )
    program = _dot_general_program(
        jax_functions.metas_of((lhs, rhs)), (contracting, batch or ((), ())), preferred_element_type
    )
    return jax_functions.call(program, (lhs, rhs))[0]
