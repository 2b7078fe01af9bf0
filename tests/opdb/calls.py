"""What is called for each kind of job, on either device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opdb import tolerances
from opdb.cases import Job, operators
from opdb.compare import Outcome, same
from opdb.samples import Sample, copy, tensors_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """How a job calls its operator.

    Attributes:
        prepare: From a sample what the call needs beside its arguments, on the CPU: `out=` tensors, cotangents.
        run: Calls the operator: (sample, args, kwargs, what `prepare` gave) to the value to compare.
        unique: From a value what is defined uniquely; None for all of it.
        written: Whether the value is a pair: what was returned, and what was written to.
    """

    prepare: Callable[[Sample], Any]
    run: Callable[[Sample, tuple[Any, ...], dict[str, Any], Any], Any]
    unique: Callable[[Sample, Any], Any] | None = None
    written: bool = False

    def finish(self, sample: Sample, outcome: Outcome) -> Outcome:
        """The outcome with only what is defined uniquely."""
        if self.unique is None or outcome.error is not None:
            return outcome
        values = outcome.value if self.written else (outcome.value,)
        return Outcome([self.unique(sample, value) for value in values])


def of(job: Job) -> Call:
    """How a job calls its operator."""
    info = operators()[job.op]
    loose = tolerances.loose(job.op)
    unique: Callable[[Sample, Any], Any] | None = None
    if loose == "gauge":
        unique = _processed
    elif loose == "ties":
        unique = functools.partial(_pointed_to, job.op)

    def nothing(sample: Sample) -> None:
        return None

    def forward(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Any) -> Any:
        return info(*args, **kwargs)

    def inplace(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Any) -> Any:
        returned = info.inplace_variant(*args, **kwargs)
        return returned, args[0]

    def outs(sample: Sample) -> Any:
        args, kwargs = sample.arguments("cpu")
        expected = info(*args, **kwargs)
        spread = _junk_like(expected, spread=True)
        written = copy(spread, "cpu")
        args, kwargs = sample.arguments("cpu")
        try:
            info(*args, **kwargs, out=written)
        except TypeError:  # this form has no `out`, and must say so on both devices
            return spread
        # A few CPU kernels do not write rightly to memory with gaps.
        return spread if same(Outcome(expected), Outcome(written)) else _junk_like(expected, spread=False)

    def out(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Any) -> Any:
        returned = info(*args, **kwargs, out=extra)
        return returned, extra

    def cotangents(sample: Sample) -> Any:
        args, kwargs = sample.arguments("cpu")
        torch.manual_seed(0)
        results = _differentiable(sample.process(info(*args, **kwargs)))
        torch.manual_seed(1)
        return [torch.randn(r.shape, dtype=r.dtype) for r in results]

    def gradient(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Any) -> Any:
        leaves = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
        results = _differentiable(sample.process(info(*args, **kwargs)))
        if len(results) != len(extra):
            raise RuntimeError(f"{len(results)} results can be differentiated, on the CPU {len(extra)}")
        return torch.autograd.grad(results, leaves, extra, allow_unused=True) if results else None

    def both(sample: Sample, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Any) -> Any:
        results = info(*args, **kwargs)
        leaves, outputs = _differentiable((args, kwargs)), _differentiable(results)
        if not leaves or not outputs:
            return results
        return results, torch.autograd.grad(outputs, leaves, [torch.ones_like(r) for r in outputs], allow_unused=True)

    return {
        "forward": Call(nothing, forward, unique),
        "inplace": Call(nothing, inplace, unique, written=True),
        "out": Call(outs, out, unique, written=True),
        "gradient": Call(cotangents, gradient),
        "error": Call(nothing, forward),
        "platform": Call(nothing, both),
    }[job.kind]


def _processed(sample: Sample, value: Any) -> Any:
    return sample.process(value)


# Where the dimension is among the arguments, if it is not given by name.
_DIM = {"sort": 1, "argsort": 1, "topk": 2, "kthvalue": 2, "mode": 1}


def _pointed_to(op: str, sample: Sample, value: Any) -> Any:
    """Indices replaced by the elements of the input that they name."""
    if sample.kwargs.get("stable"):
        return value
    values, indices = (None, value) if isinstance(value, torch.Tensor) else value
    given = sample.args[_DIM[op]] if len(sample.args) > _DIM[op] else -1
    dim = sample.kwargs.get("dim", given)
    source = sample.args[0].detach()
    if source.dim() == 0:
        return values, source.reshape(1)[indices]
    dropped = indices.dim() < source.dim()
    named = torch.take_along_dim(source, indices.unsqueeze(dim) if dropped else indices, dim)
    return values, named.squeeze(dim) if dropped else named


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [r for r in tensors_of(results) if r.requires_grad]


def _junk_like(results: Any, spread: bool) -> Any:
    """Tensors to write results to: full of something else, with gaps between their elements or not."""
    if not isinstance(results, torch.Tensor):
        return tuple(_junk_like(r, spread) for r in results)
    shape = (*results.shape, 2) if spread else results.shape
    junk = torch.ones(shape, dtype=results.dtype)
    return junk[..., 0] if spread else junk
