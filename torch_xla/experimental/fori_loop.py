"""Loops as one operator of the graph: the body is traced once, however often it runs.

`torch.while_loop` on xla tensors is one too, as soon as this module is imported; before, it runs turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._core.functions import while_loop as loops
from torch_xla._errors import message
from torch_xla._torch_internals import DispatchKey, pytree, while_loop_dense, while_loop_op


@while_loop_op.py_impl(DispatchKey.XLA)
def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] | None = None,
) -> Any:
    """Calls a function on its own results for as long as a condition holds; without gradients.

    Tensors that the functions use from outside are inputs of the loop. Random operators draw the same numbers in each
    turn.

    Args:
        cond_fn: Takes the carried and the additional values and returns one truth value.
        body_fn: Takes the same and returns the carried values of the next turn, of the same shapes and dtypes.
        carried_inputs: Values to start with, on an XLA device.
        additional_inputs: Values that do not change.

    Returns:
        The carried values after the last turn.

    Raises:
        RuntimeError: The body returns other shapes or dtypes, or another number of values.
    """
    carried, additional = tuple(carried_inputs), tuple(additional_inputs or ())
    if not all(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((carried, additional))):
        return while_loop_dense(cond_fn, body_fn, carried, additional)  # a number must be one again afterwards
    return loops.while_loop(cond_fn, body_fn, carried, additional)


def fori_loop(
    lower: int | torch.Tensor, upper: int | torch.Tensor, body_fun: Callable[..., Any], *input_value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Calls a function ``upper - lower`` times on its own results, or never if `upper` is not above `lower`.

    Args:
        lower: Start of the count, a number or a tensor of one integer.
        upper: Its end, likewise.
        body_fun: Takes the values and returns new ones of the same shapes and dtypes.
        *input_value: Values to start with, on an XLA device.

    Returns:
        How many turns are left, which is 0, and the values.

    Raises:
        ValueError: There are no values on an XLA device.
    """
    devices = [x.device for x in input_value if isinstance(x, torch.Tensor) and x.device.type == "xla"]
    if not devices:
        raise ValueError(message("fori_loop", "got no values on an XLA device", expected="at least one"))
    turns = torch.as_tensor(upper - lower, device=devices[0]).clamp(min=0)

    def body(remaining: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        after = body_fun(*values)
        return remaining - 1, *(after if isinstance(after, (tuple, list)) else (after,))

    return loops.while_loop(lambda remaining, *values: remaining > 0, body, (turns, *input_value), ())
