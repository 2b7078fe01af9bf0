"""Collectives that autograd differentiates, imported as ``xf``."""

from __future__ import annotations

from typing import Any

import torch

from torch_xla import runtime
from torch_xla._errors import message
from torch_xla.core import xla_model as xm


class AllReduce(torch.autograd.Function):
    """`all_reduce` with its gradient, where all processes compute the same from the result."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, reduce_type: str, scale: float, groups: list[list[int]] | None
    ) -> torch.Tensor:
        """Reduces."""
        output = xm.all_reduce(reduce_type, input, scale=scale, groups=groups)
        assert isinstance(output, torch.Tensor)
        ctx.reduce_type, ctx.scale = reduce_type, scale
        ctx.save_for_backward(input, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of this process's part."""
        input, output = ctx.saved_tensors
        grad = grad_outputs[0] * ctx.scale if ctx.scale != 1.0 else grad_outputs[0]
        if ctx.reduce_type == xm.REDUCE_MUL:
            grad = grad * torch.where(input != 0, output / ctx.scale / input, 0)
        elif ctx.reduce_type in (xm.REDUCE_MIN, xm.REDUCE_MAX):
            grad = torch.where(input * ctx.scale == output, grad, 0)
        elif ctx.reduce_type != xm.REDUCE_SUM:
            raise RuntimeError(
                message("all_reduce", f"got a gradient of {ctx.reduce_type!r}", expected="sum, min, max or mul")
            )
        return grad, None, None, None


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: list[list[int]] | None = None
) -> torch.Tensor:
    """Reduces a tensor over all processes; see `torch_xla.core.xla_model.all_reduce`.

    The gradient is right where each process computes the same loss from the result, and none is summed twice.

    Args:
        reduce_type: One of the ``REDUCE_`` constants.
        value: The tensor.
        scale: Factor applied to the result.
        groups: Lists of ordinals that reduce among themselves.
    """
    return AllReduce.apply(value, reduce_type, scale, groups)


class AllGather(torch.autograd.Function):
    """`all_gather` with its gradient, where all processes compute the same from the result."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int) -> torch.Tensor:
        """Gathers."""
        ctx.dim = dim
        gathered = xm.all_gather(input, dim=dim)
        assert isinstance(gathered, torch.Tensor)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The part of the gradient that belongs to this process."""
        size = grad_outputs[0].size(ctx.dim) // runtime.world_size()
        return grad_outputs[0].narrow(ctx.dim, runtime.global_ordinal() * size, size), None


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenates the tensors of all processes; see `torch_xla.core.xla_model.all_gather`.

    The gradient is right where each process computes the same loss from the result, and none is summed twice.

    Args:
        value: The tensor.
        dim: The dimension.
    """
    return AllGather.apply(value, dim)


class AllReduceSumLayer(torch.autograd.Function):
    """The sum over all processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Sums."""
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        """Sums."""
        return _sum(grad_outputs[0])


def _sum(x: torch.Tensor) -> torch.Tensor:
    total = xm.all_reduce(xm.REDUCE_SUM, x)
    assert isinstance(total, torch.Tensor)
    return total


class SyncBatchNorm(torch.nn.Module):
    """Batch normalisation with the mean and variance of all processes' batches together.

    Args:
        num_features: Length of dimension 1 of the batches.
        eps: Added to the variance.
        momentum: Share of a batch in the running mean and variance.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = torch.nn.Parameter(torch.ones(num_features))
        self.bias = torch.nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Normalises a batch of 2 to 5 dimensions."""
        if not 2 <= batch.dim() <= 5 or batch.size(1) != self.num_features:
            raise AssertionError(
                message("batch_norm", f"got shape {tuple(batch.shape)}", expected=f"(n, {self.num_features}, ...)")
            )
        shape = (1, -1, *[1] * (batch.dim() - 2))
        # Half types have neither the range for counts and sums of squares nor the digits for means.
        wide = batch.to(torch.promote_types(batch.dtype, torch.float32))
        mean, variance = self._statistics(wide, shape) if self.training else (self.running_mean, self.running_var)
        factor = self.weight * torch.rsqrt(variance.to(wide.dtype) + self.eps)
        return ((wide - mean.view(shape)) * factor.view(shape) + self.bias.view(shape)).to(batch.dtype)

    def _statistics(self, batch: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        dims = [dim for dim in range(batch.dim()) if dim != 1]
        # The processes' batches need not have the same size.
        count = batch.new_full((1,), batch.numel() // self.num_features)
        total, number = AllReduceSumLayer.apply(torch.cat([batch.sum(dims), count])).split([self.num_features, 1])
        mean = total / number
        # From the differences: a mean of squares less the square of the mean would lose the digits of small variances.
        variance = AllReduceSumLayer.apply((batch - mean.view(shape)).square().sum(dims)) / number
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        return mean, variance

    def extra_repr(self) -> str:
        """The settings that `repr` shows."""
        return f"{self.num_features}, eps={self.eps}"


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """Multiplies a weight that is split by columns over the processes with an input.

    Args:
        w: This process's columns of the weight, N x K.
        x: The input, (K times the number of processes) x M.
        split: Number of parts of M that are gathered one after the other, which bounds memory.
    """
    world, ordinal = runtime.world_size(), runtime.global_ordinal()
    if x.size(0) != w.size(1) * world or x.size(1) % split:
        raise AssertionError(
            message(
                "distributed_mm",
                f"shapes {tuple(w.shape)} and {tuple(x.shape)}, split={split}",
                expected=f"{w.size(1) * world} rows of x and columns that {split} divides",
            )
        )
    results = []
    for part in torch.split(x, x.size(1) // split, dim=1):
        gathered = all_gather(part, dim=1)
        rows = gathered.narrow(0, ordinal * w.size(1), w.size(1))
        summed = all_reduce(xm.REDUCE_SUM, w @ rows)
        results.append(summed.narrow(1, ordinal * part.size(1), part.size(1)))
    return torch.cat(results, dim=1)
