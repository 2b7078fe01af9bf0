"""Gradients of several small batches added up in one loop of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._core.functions import scan_operator
from torch_xla._errors import message


class _Step(torch.nn.Module):
    """A training step that can be called with other parameters of its model."""

    def __init__(self, model: torch.nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._step = step

    def forward(self, *args: torch.Tensor) -> Any:
        return self._step(*args)


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: torch.nn.Module,
    *carried_tensors: torch.Tensor,
) -> Any:
    """Runs a training step and its backward pass for each slice of some tensors, as one loop.

    Afterwards the gradients of the model's parameters have grown by the mean over the slices, and its buffers are those
    after the last turn. Random operators draw other numbers in each turn.

    Args:
        train_step: Takes a slice of each of `iterable_tensors` and the carried tensors; returns the loss, and with
            carried tensors also their next values. It calls `model` and writes to none of its arguments.
        iterable_tensors: Tensors on an XLA device with a common first size, that of the loop.
        model: The model. Its parameters are used inside `train_step` alone.
        *carried_tensors: Values passed from turn to turn, of one shape and dtype.

    Returns:
        The mean of the losses as float32, and after it the carried tensors if there are any.

    Raises:
        ValueError: `iterable_tensors` is empty, or holds something else than tensors of one first size, none empty.
        RuntimeError: `train_step` writes to an argument or returns another number of carried values.
    """
    _check(iterable_tensors)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    trained = [name for name, p in parameters.items() if p.requires_grad]
    steps = iterable_tensors[0].shape[0]
    step = _Step(model, train_step)
    carried = len(carried_tensors)

    def turn(*values: torch.Tensor) -> list[torch.Tensor]:
        operands = iter(values)
        total = next(operands)
        sums = [next(operands) for _ in trained]
        before = [next(operands) for _ in range(carried)]
        state = {name: next(operands).clone() for name in buffers}
        slices = [next(operands) for _ in iterable_tensors]
        weights = {name: next(operands).detach().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        with torch.enable_grad():
            named = {f"model.{name}": value for name, value in {**weights, **state}.items()}
            result = torch.func.functional_call(step, named, (*slices, *before))
            loss, *after = result if carried else (result,)
            if len(after) != carried:
                got = f"train_step returned {len(after)} carried values"
                raise RuntimeError(message("gradient_accumulation", got, expected=str(carried)))
            loss = loss / steps
            trained_weights = [weights[name] for name in trained]
            grads = torch.autograd.grad(loss, trained_weights, allow_unused=True) if trained_weights else ()
        sums = [s if g is None else s + g for s, g in zip(sums, grads, strict=True)]
        return [total + loss.detach(), *sums, *(a.detach() for a in after), *state.values()]

    device = iterable_tensors[0].device
    start = [
        torch.zeros((), device=device),
        *(torch.zeros_like(parameters[name]) for name in trained),
        *(t.detach() for t in carried_tensors),
        *buffers.values(),
    ]
    fixed = [p.detach() for p in parameters.values()]
    with torch.no_grad():
        operator = scan_operator.operator(
            turn, start, iterable_tensors, fixed, "gradient_accumulation", gradients=False
        )
        loss, *rest = operator([*start, *iterable_tensors, *fixed])
        for name, grad in zip(trained, rest, strict=False):
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)
        after = rest[len(trained) : len(trained) + carried]
        for buffer, value in zip(buffers.values(), rest[len(trained) + carried :], strict=True):
            buffer.copy_(value)
    return (loss, *after) if carried else loss


def _check(tensors: Sequence[Any]) -> None:
    if not tensors:
        raise ValueError(message("gradient_accumulation", "iterable_tensors is empty", expected="at least one tensor"))
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            got = f"element {i} of iterable_tensors is a {type(tensor).__name__}"
            raise ValueError(message("gradient_accumulation", got, expected="tensors"))
        if tensor.numel() == 0 or tensor.dim() == 0:
            got = f"element {i} of iterable_tensors has the shape {tuple(tensor.shape)}"
            raise ValueError(message("gradient_accumulation", got, expected="slices along the first dimension"))
        if tensor.shape[0] != tensors[0].shape[0]:
            got = f"element {i} of iterable_tensors has the first size {tensor.shape[0]}"
            raise ValueError(message("gradient_accumulation", got, expected=str(tensors[0].shape[0])))
