"""Products with weights of 8 or 4 bits (``torch.ops.xla.quantized_matmul``), and a linear layer that has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torch_xla import _bindings
from torch_xla._errors import message
from torch_xla._torch_internals import _decomposed  # noqa: F401  # operators that make such weights
from torch_xla.core.xla_model import XLA_LIB

MaybeTensor = torch.Tensor | None


def _check(x_size: int, w: torch.Tensor, scale: torch.Tensor, zero_point: MaybeTensor, block_size: int) -> None:
    """Refuses weights whose shapes do not fit; as in torch_xla 2, with AssertionErrors."""
    if w.dtype != torch.int8:
        raise AssertionError(message("quantized_matmul", f"got weights of {w.dtype}", expected="torch.int8"))
    if block_size == -1:
        expected = f"[columns, {x_size}]"
        fits = w.dim() == 2 and w.shape[1] == x_size
        of_factors = w.shape[:1]
    else:
        expected = f"[{x_size} / block_size, {block_size}, columns]"
        fits = block_size > 0 and w.dim() == 3 and w.shape[1] == block_size and w.shape[0] * block_size == x_size
        of_factors = torch.Size((w.shape[0], w.shape[-1]))
    if not fits:
        raise AssertionError(message("quantized_matmul", f"got weights of shape {list(w.shape)}", expected=expected))
    for name, factors in (("scale", scale), ("zero_point", zero_point)):
        if factors is not None and factors.shape != of_factors:
            got = f"got a {name} of shape {list(factors.shape)}"
            raise AssertionError(message("quantized_matmul", got, expected=str(list(of_factors))))


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factor = x.abs().amax(dim=-1, keepdim=True) / 127
    return torch.round(x / factor).to(torch.int8), factor


def _quantized_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    zero_point: MaybeTensor = None,
    block_size: int | None = -1,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> torch.Tensor:
    """`x` times integer weights, on any device; on this one it is a single operator.

    Args:
        x: ``[..., inner]``.
        w: int8. ``[columns, inner]``, or ``[inner / block_size, block_size, columns]``.
        scale: Factor of each column, ``[columns]``; in blocks ``[inner / block_size, columns]``.
        zero_point: What is taken from each weight before all else, times its `scale`; of the shape of `scale`.
        block_size: Size of the blocks of the inner dimension that have factors of their own; -1 for none.
        int4_weight: Whether the weights are numbers of 4 bits, which they are told to be in the program.
        quantize_activation: Whether each row of `x` is rounded to int8 first; not in blocks.

    Returns:
        ``[..., columns]``.

    Raises:
        AssertionError: The shapes do not fit, the weights are not int8, or `x` shall be rounded in blocks.
    """
    block_size = -1 if block_size is None else block_size
    _check(x.shape[-1], w, scale, zero_point, block_size)
    if block_size != -1:
        if quantize_activation:
            got = "got quantize_activation with blocks"
            raise AssertionError(message("quantized_matmul", got, expected="block_size=-1", do="leave one out"))
        x = x.reshape(*x.shape[:-1], -1, block_size)
        out = torch.einsum("scn,...sc->...sn", w.to(x.dtype), x)
        out = torch.einsum("sn,...sn->...n", scale, out)
        return out if zero_point is None else out - x.sum(-1) @ zero_point
    factor = None
    if quantize_activation:
        x, factor = _quantized(x)
        out = F.linear(x.to(torch.int32), w.to(torch.int32)) * scale
    else:
        out = F.linear(x, w.to(x.dtype)) * scale
    if zero_point is not None:
        out = out - (x.sum(-1, keepdim=True) * zero_point).to(out.dtype)
    return out if factor is None else out * factor


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, scale, zero_point, *ctx.rest = inputs
    ctx.save_for_backward(x, w, scale, zero_point)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[MaybeTensor, ...]:
    """The gradients of the function above; XLA computes no more than they need."""
    w = ctx.saved_tensors[1]
    leaves = [
        None if t is None else t.detach().requires_grad_(differentiable and t is not w)
        for t, differentiable in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    ]
    differentiable = [t for t in leaves if t is not None and t.requires_grad]
    with torch.enable_grad():
        out = _quantized_matmul(*leaves, *ctx.rest)  # type: ignore[arg-type]
        gradients = iter(torch.autograd.grad(out, differentiable, grad, allow_unused=True))
    return *(next(gradients) if t is not None and t.requires_grad else None for t in leaves), None, None, None


XLA_LIB.define(
    "quantized_matmul(Tensor x, Tensor w, Tensor scale, Tensor? zero_point=None, int? block_size=-1, "
    "bool? int4_weight=False, bool? quantize_activation=False) -> Tensor"
)
XLA_LIB.impl("quantized_matmul", _quantized_matmul, "CompositeExplicitAutograd")
_bindings.record_undecomposed(["xla::quantized_matmul"])
torch.library.register_autograd("xla::quantized_matmul", _gradients, setup_context=_keep, lib=XLA_LIB)


class XlaQuantizedLinear(torch.nn.Module):
    """A linear layer without bias whose weights are integers; `load_quantized_weight` gives it some.

    Args:
        input_dim: Size of the inputs.
        output_dim: Size of the results.
        is_symmetric: Whether the weights have no zero points.
        block_size: As for the operator, and so are the others.
        int4_weight: See there.
        quantize_activation: See there.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        is_symmetric: bool = False,
        block_size: int = -1,
        int4_weight: bool = False,
        quantize_activation: bool = False,
    ) -> None:
        super().__init__()
        self.input_dim, self.output_dim = input_dim, output_dim
        self.is_symmetric, self.block_size = is_symmetric, block_size
        self.int4_weight, self.quantize_activation = int4_weight, quantize_activation
        self.register_buffer("weight", torch.zeros(output_dim, input_dim, dtype=torch.int8))
        self.register_buffer("weight_scaler", torch.zeros(output_dim))
        self.register_buffer("zero_point", None if is_symmetric else torch.zeros(output_dim))

    def load_quantized_weight(
        self, weight: torch.Tensor, weight_scaler: torch.Tensor, zero_point: MaybeTensor = None
    ) -> None:
        """Takes other weights.

        Args:
            weight: `w` of the operator.
            weight_scaler: `scale` of the operator.
            zero_point: Likewise.
        """
        _check(self.input_dim, weight, weight_scaler, zero_point, self.block_size)
        if weight.shape[0 if self.block_size == -1 else -1] != self.output_dim:
            got = f"got weights of shape {list(weight.shape)}"
            raise AssertionError(message("quantized_matmul", got, expected=f"{self.output_dim} columns"))
        self.weight, self.weight_scaler, self.zero_point = weight, weight_scaler, zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        result: torch.Tensor = torch.ops.xla.quantized_matmul(
            x,
            self.weight,
            self.weight_scaler,
            self.zero_point,
            block_size=self.block_size,
            int4_weight=self.int4_weight,
            quantize_activation=self.quantize_activation,
        )
        return result
