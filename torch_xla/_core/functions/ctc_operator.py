"""Records the CTC loss with its lengths as inputs of the graph, so that other lengths compile nothing.

PyTorch takes lengths as numbers, which would be constants of the program, and sizes what it saves for the backward pass
by their maximum. Here the targets' width does that, and both passes are one operator each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from torch_xla._core.graph.library import XLA_LIB
from torch_xla._torch_internals import transforms_are_active

Lengths = torch.Tensor | Sequence[int]

_MEAN, _SUM = 1, 2  # PyTorch's numbers of these reductions
_WIDTHS = 16  # to whose multiples rows are padded, since each width compiles a graph
_registered: list[torch.library.Library] = []


def install() -> None:
    """Registers the operators and this way to the loss; called once, at import."""
    arguments = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
    XLA_LIB.define(f"ctc_loss({arguments}, int blank) -> (Tensor, Tensor)")
    XLA_LIB.define(
        f"ctc_loss_backward(Tensor grad, {arguments}, Tensor loss, Tensor log_alpha, int blank, bool zero_infinity)"
        " -> Tensor"
    )
    XLA_LIB.impl("ctc_loss", _meta_kernel, "Meta")
    XLA_LIB.impl("ctc_loss", _cpu_kernel, "CPU")
    XLA_LIB.impl("ctc_loss_backward", _cpu_backward, "CPU")
    XLA_LIB.impl("ctc_loss_backward", lambda _, log_probs, *rest: torch.empty_like(log_probs), "Meta")
    library = torch.library.Library("aten", "IMPL")
    for form in ("ctc_loss.Tensor", "ctc_loss.IntList"):
        for key in ("AutogradXLA", "XLA"):
            library.impl(form, _ctc_loss, key)
    _registered.append(library)


def _meta_kernel(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * targets.shape[1] + 1)


def _check_labels(log_probs: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> None:
    labels = targets[torch.arange(targets.shape[1]) < lengths.unsqueeze(1)]
    if labels.lt(0).any() or labels.ge(log_probs.shape[2]).any():
        raise IndexError("a label that is none")  # PyTorch's kernel would read what stands behind


def _cpu_kernel(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _check_labels(log_probs, targets, rest[1])
    loss, log_alpha = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *rest)
    return loss, torch.nn.functional.pad(log_alpha, (0, 2 * targets.shape[1] + 1 - log_alpha.shape[2]))


def _cpu_backward(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
    *arguments, log_alpha, blank, zero_infinity = rest
    _check_labels(arguments[0], arguments[1], arguments[3])
    log_alpha = log_alpha[..., : 2 * int(arguments[3].max()) + 1].contiguous()
    return torch.ops.aten._ctc_loss_backward.Tensor(grad, *arguments, log_alpha, blank, zero_infinity)


class _Loss(torch.autograd.Function):
    """One loss per sequence."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> torch.Tensor:
        *tensors, blank, zero_infinity = arguments
        loss, log_alpha = torch.ops.xla.ctc_loss(*tensors, blank)
        ctx.save_for_backward(*tensors, loss, log_alpha)
        ctx.rest = blank, zero_infinity  # type: ignore[attr-defined]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _Slope.apply(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


class _Slope(torch.autograd.Function):
    """Their derivative, which has none itself in PyTorch either."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> torch.Tensor:
        return torch.ops.xla.ctc_loss_backward(*arguments)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[Any, ...]:
        raise RuntimeError("derivative for aten::_ctc_loss_backward is not implemented")


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.ctc_loss` on device xla, in the two forms of its lengths."""
    if transforms_are_active():  # which know nothing of the operators here
        form = "Tensor" if isinstance(target_lengths, torch.Tensor) else "IntList"
        return getattr(torch.ops.aten.ctc_loss, form).decompose(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        if isinstance(lengths, torch.Tensor) and (lengths.is_floating_point() or lengths.dtype == torch.bool):
            raise RuntimeError(f"{name} must be integral")
    batched = log_probs.dim() == 3
    log_probs = log_probs if batched else log_probs.unsqueeze(1)
    input_lengths, target_lengths = _as_tensor(input_lengths), _as_tensor(target_lengths)
    if targets.dim() == 1:
        target_lengths = target_lengths.cpu()
    _refuse(log_probs, targets, input_lengths, target_lengths, blank)
    if targets.dim() == 1:
        targets = _rows(targets.cpu(), target_lengths)
    inputs, lengths = input_lengths.to(log_probs.device), target_lengths.to(log_probs.device)
    loss = _Loss.apply(log_probs, targets.to(log_probs.device, torch.long), inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0.0, loss)
    if reduction == _MEAN:
        return (loss / lengths.clamp_min(1).to(loss.dtype)).mean()
    if reduction == _SUM:
        return loss.sum()
    return loss if batched else loss.squeeze(0)


def _as_tensor(lengths: Lengths) -> torch.Tensor:
    if isinstance(lengths, torch.Tensor):
        return lengths.reshape(-1).to(torch.long)
    return torch.tensor(lengths, dtype=torch.long)


def _rows(targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Targets that stand one after another as rows; what stands behind a sequence's own labels does not count.

    On the host, since there are as many as each batch has, and every other number would compile the graph once more.
    """
    width = -(-max(lengths.tolist(), default=0) // _WIDTHS) * _WIDTHS
    rows = targets.new_zeros(lengths.numel(), width)
    rows[torch.arange(width) < lengths.unsqueeze(1)] = targets
    return rows


def _refuse(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor, lengths: torch.Tensor, blank: int
) -> None:
    """Raises as PyTorch's kernel does, which runs, on zeros, where there is a reason to.

    Of lengths on the device that is their number alone: their values are not waited for.
    """
    flat = targets.dim() == 1
    known_inputs, label_lengths = (x.tolist() if x.device.type == "cpu" else [0] * x.numel() for x in (inputs, lengths))
    if log_probs.dim() == 3 and targets.dim() in (1, 2) and log_probs.is_floating_point() and log_probs.numel():
        steps, batch, labels = log_probs.shape
        fits = sum(label_lengths) == targets.numel() if flat else targets.shape[0] == batch
        most = targets.numel() if flat else targets.shape[1]
        if (
            fits
            and 0 <= blank < labels
            and len(known_inputs) == len(label_lengths) == batch
            and all(0 <= n <= steps for n in known_inputs)
            and all(0 <= n <= most for n in label_lengths)
        ):
            return
    zeros = torch.zeros(log_probs.shape, dtype=log_probs.dtype, device="cpu")
    labels_of_zero = torch.zeros(targets.shape, dtype=torch.long, device="cpu")
    torch.ops.aten._ctc_loss.default(zeros, labels_of_zero, known_inputs, label_lengths, blank)
