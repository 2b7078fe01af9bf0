"""Checking one job in this process.

All samples of a job are recorded first and computed by one barrier, so that one compile serves them. Only if that
barrier fails they are taken one by one.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch

import torch_xla
from opdb import calls, samples, skips, tolerances
from opdb.calls import Call
from opdb.cases import DTYPES, Job
from opdb.compare import Outcome, attempt, devices_wrong, difference, same
from opdb.samples import Sample
from torch_xla import _XLAC, _bindings
from torch_xla._core.compile import cache
from torch_xla._core.device import described
from torch_xla._core.execute import barrier, export
from torch_xla._core.lower import lowering
from torch_xla.debug import metrics
from torch_xla.ops import host_kernel

PLATFORMS = ("cuda", "tpu")  # by JAX's names
SLOW = 3.0  # seconds that the first use of an operator may take


@dataclass
class Result:
    """What became of a job.

    Attributes:
        op: The job's operator.
        dtype: The job's dtype.
        kind: The job's kind.
        status: ``pass``, ``callback`` (passed, with a callback to the host in the program), ``cut`` (passed, with a
            part computed between two programs), ``fail``, ``skip``, ``crash`` or ``hang``.
        messages: What failed, or why the job was skipped.
        samples: Number of calls checked.
        host_ops: Operators that ran on the host.
        seconds: Time to lower, compile and run the first program; of one sample where all took longer than `SLOW`.
        wording: Errors of the right type that say something else than the CPU's.
    """

    op: str
    dtype: str
    kind: str
    status: str = "pass"
    messages: list[str] = field(default_factory=list)
    samples: int = 0
    host_ops: list[str] = field(default_factory=list)
    seconds: float = 0.0
    wording: list[str] = field(default_factory=list)

    @property
    def job(self) -> Job:
        """The job."""
        return Job(self.op, self.dtype, self.kind)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(job: Job) -> Result:
    """Checks one job."""
    result = Result(job.op, job.dtype, job.kind)
    reason = skips.reason(job)
    if reason is not None:
        result.status, result.messages = "skip", [reason]
        return result
    with (
        warnings.catch_warnings(),
        mock.patch.object(host_kernel, "_LEAST", 0),
        mock.patch.object(host_kernel, "_place", wraps=host_kernel._place) as kernel,
    ):
        warnings.simplefilter("ignore")
        _check(job, result)
        if kernel.called:  # its rule is what other devices have
            rule = Result(job.op, job.dtype, job.kind)
            with mock.patch.object(host_kernel, "register", lambda: False):
                _check(job, rule)
            if rule.status == "fail":
                result.status = "fail"
                result.messages += [f"by its rule: {text}" for text in rule.messages]
    return result


def _check(job: Job, result: Result) -> None:
    cache.clear()
    lowering._rules.clear()  # host callbacks are counted when an operator is lowered
    if job.kind == "error":
        _check_errors(job, result)
    elif job.kind == "platform":
        _check_platforms(job, result)
    else:
        _check_values(job, result)


def _check_values(job: Job, result: Result) -> None:
    chosen = samples.choose(job)
    result.samples = len(chosen)
    if not chosen:
        result.status, result.messages = "fail", ["the operator database gave no sample"]
        return
    call = calls.of(job)
    expected = [_expect(job, call, sample) for sample in chosen]
    run = _Run()
    got = [run.record(call, sample, want) for sample, want in zip(chosen, expected, strict=True)]
    try:
        run.compute(got)
    except RuntimeError:
        got = [_alone(call, sample, want) for sample, want in zip(chosen, expected, strict=True)]
    result.seconds = run.seconds
    if run.seconds > SLOW:
        cache.clear()
        lowering._rules.clear()
        alone = _Run()
        alone.compute([alone.record(call, chosen[0], expected[0])])
        result.seconds = alone.seconds
    for sample, want, have in zip(chosen, expected, got, strict=True):
        if sample.twin and want.outcome.error is not None:
            continue  # a CPU kernel that takes no gaps between elements
        values = call.finish(sample, want.outcome), call.finish(sample, have.outcome)
        text = have.wrong or difference(job.op, *values, drawn=want.drawn, gradient=job.kind == "gradient")
        if text:
            result.messages.append(f"{text} [{sample.text[:200]}]")
    result.host_ops = sorted(run.cuts | run.callbacks)
    if result.messages:
        result.status = "fail"
    elif run.cuts:
        result.status = "cut"
    elif run.callbacks:
        result.status = "callback"


@dataclass
class _Expected:
    """The CPU's outcome.

    Attributes:
        outcome: The outcome.
        extra: What a call needs beside its arguments, such as cotangents.
        drawn: Whether the outcome changes with the seed.
    """

    outcome: Outcome
    extra: Any = None
    drawn: bool = False


@dataclass
class _Got:
    outcome: Outcome
    wrong: str | None = None


def _expect(job: Job, call: Call, sample: Sample) -> _Expected:
    narrow = DTYPES[job.dtype]
    wide = tolerances.loose(job.op) == "wide" and narrow in (torch.bfloat16, torch.float16)

    def run(seed: int) -> Outcome:
        (args, kwargs), given = sample.arguments("cpu"), samples.copy(extra, "cpu")
        torch.manual_seed(seed)
        if not wide:
            return attempt(lambda: call.run(sample, args, kwargs, given))
        args, kwargs, given = samples.cast((args, kwargs, given), narrow, torch.float32)
        return attempt(lambda: samples.cast(call.run(sample, args, kwargs, given), torch.float32, narrow))

    try:
        extra = call.prepare(sample)
    except Exception as error:
        return _Expected(Outcome(error=error))
    outcome = run(0)
    random = tolerances.loose(job.op) == "random" and outcome.error is None
    drawn = random and not all(same(outcome, run(seed)) for seed in range(1, 7))
    return _Expected(outcome, extra, drawn)


class _Run:
    """Recording calls, then computing them by one barrier; counts what ran on the host."""

    def __init__(self) -> None:
        metrics.clear_counters()
        self.cuts: set[str] = set()
        self.callbacks: set[str] = set()
        self.seconds = 0.0

    def record(self, call: Call, sample: Sample, want: _Expected) -> _Got:
        (args, kwargs), extra = sample.arguments("xla"), samples.copy(want.extra, "xla")
        torch.manual_seed(0)
        outcome = attempt(lambda: call.run(sample, args, kwargs, extra))
        self.cuts = host_ops()
        stays = "device" not in kwargs and not any(True for _ in samples.tensors_of((args, kwargs)))
        return _Got(outcome, None if outcome.error or stays else devices_wrong(outcome.value))

    def compute(self, got: Iterable[_Got]) -> None:
        """Computes and fetches the values.

        Raises:
            RuntimeError: The program could not be lowered, compiled or run.
        """
        tensors = [t for g in got for t in samples.tensors_of(g.outcome.value) if t.device.type == "xla"]
        started, worked = time.perf_counter(), time.process_time()
        try:
            _XLAC._xla_sync_multi([t for t in tensors if t.layout == torch.strided])
        except Exception as error:
            torch_xla.sync()  # what the failed program left pending
            raise RuntimeError(str(error)) from error
        # The smaller of the two: other processes do not count, nor do this one's other threads.
        self.seconds = min(time.perf_counter() - started, time.process_time() - worked)
        self.callbacks = host_ops() - self.cuts
        for g in got:
            g.outcome = attempt(lambda g=g: fetch(g.outcome.value)) if g.outcome.error is None else g.outcome


def _alone(call: Call, sample: Sample, want: _Expected) -> _Got:
    run = _Run()
    got = run.record(call, sample, want)
    try:
        run.compute([got])
    except RuntimeError as error:
        got.outcome = Outcome(error=error)
    return got


def host_ops() -> set[str]:
    """Operators that ran on the host."""
    # Those of `xla` count what was recorded.
    return {name for name in metrics.counter_names() if "::" in name and not name.startswith("xla::")}


def fetch(value: Any) -> Any:
    """Nested values on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(fetch, value))
    return {k: fetch(v) for k, v in value.items()} if isinstance(value, dict) else value


def _check_platforms(job: Job, result: Result) -> None:
    """Lowers the operator and its gradient for other devices; nothing runs."""
    call = calls.of(job)
    metrics.clear_counters()
    chosen = samples.choose(job)
    recorded = [attempt(lambda sample=s: call.run(sample, *sample.arguments("xla"), None)) for s in chosen]
    cuts = host_ops()
    for sample, outcome in zip(chosen, recorded, strict=True):
        results = [t for t in samples.tensors_of(outcome.value) if t.device.type == "xla"]
        pending = [t for t in results if _bindings.location_of(t) is None]
        if not pending:
            continue  # whether that is right, the other kinds tell
        result.samples += 1
        if described.topology() is not None:  # as `XLA_AHEAD=v5e:2x2 PJRT_DEVICE=TPU` has it
            error = attempt(lambda pending=pending: barrier.evaluate(pending)).error
            if error is not None:
                text = f"{type(error).__name__}: {str(error)[:300]}"
                result.messages.append(f"{described.topology()}: {text} [{sample.text[:200]}]")
            continue
        for platform in PLATFORMS:
            error = attempt(lambda pending=pending, platform=platform: export.lowered(pending, "graph", platform)).error
            # A program that calls back is lowered for this machine's devices only.
            if error is not None and host_ops() == cuts:
                result.messages.append(f"{platform}: {type(error).__name__}: {str(error)[:300]} [{sample.text[:200]}]")
    callbacks = host_ops() - cuts
    result.host_ops = sorted(host_ops())
    result.status = "fail" if result.messages else "cut" if cuts else "callback" if callbacks else "pass"


def _check_errors(job: Job, result: Result) -> None:
    call = calls.of(job)
    metrics.clear_counters()
    for sample in samples.error_samples(job):
        want = _expect(job, call, sample)
        if want.outcome.error is None:
            continue  # an error of another device
        if re.search(skips.VALUE_ERRORS, str(want.outcome.error)):
            continue
        result.samples += 1
        got = attempt(lambda sample=sample: call.run(sample, *sample.arguments("xla"), None))
        text = difference(job.op, want.outcome, got)
        if text:
            result.messages.append(f"{text} [{sample.text[:200]}]")
        elif str(got.error) != str(want.outcome.error):
            result.wording.append(
                f"{str(got.error)[:200]} | CPU: {str(want.outcome.error)[:200]} [{sample.text[:120]}]"
            )
        done = attempt(torch_xla.sync)
        if done.error is not None and not text:
            result.messages.append(f"the barrier after it failed: {str(done.error)[:200]} [{sample.text[:200]}]")
    after = torch.ones(3, device="xla") + 1
    torch_xla.sync()
    if after.tolist() != [2.0, 2.0, 2.0]:
        result.messages.append("after the errors 1 + 1 is not 2")
    if result.messages:
        result.status = "fail"
