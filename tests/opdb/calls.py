"""What is called for each kind of job, on either device."""

from __future__ import annotations

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
        gauge: Whether the value is compared after the sample's own post-processing.
        written: Whether the value is a pair: what was returned, and what was written to.
    """

    prepare: Callable[[Sample], Any]
    run: Callable[[Sample, tuple[Any, ...], dict[str, Any], Any], Any]
    gauge: bool = False
    written: bool = False

    def finish(self, sample: Sample, outcome: Outcome) -> Outcome:
        """The outcome with only what is defined uniquely."""
        if not self.gauge or outcome.error is not None:
            return outcome
        value = outcome.value
        return Outcome(tuple(map(sample.process, value)) if self.written else sample.process(value))


def of(job: Job) -> Call:
    """How a job calls its operator."""
    info = operators()[job.op]
    gauge = tolerances.loose(job.op) == "gauge" and job.kind != "gradient"

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
        info(*args, **kwargs, out=written)
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

    return {
        "forward": Call(nothing, forward, gauge),
        "inplace": Call(nothing, inplace, gauge, written=True),
        "out": Call(outs, out, gauge, written=True),
        "gradient": Call(cotangents, gradient),
        "error": Call(nothing, forward),
    }[job.kind]


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [r for r in tensors_of(results) if r.requires_grad]


def _junk_like(results: Any, spread: bool) -> Any:
    """Tensors to write results to: full of something else, with gaps between their elements or not."""
    if not isinstance(results, torch.Tensor):
        return tuple(_junk_like(r, spread) for r in results)
    shape = (*results.shape, 2) if spread else results.shape
    junk = torch.ones(shape, dtype=results.dtype)
    return junk[..., 0] if spread else junk
