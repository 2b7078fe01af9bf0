"""Checking one overload of aten: argument sets that the search found, on device xla and on the CPU."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch

import torch_xla
from opdb import skips, tolerances
from opdb.cases import Job
from opdb.check import fetch, host_ops
from opdb.compare import Outcome, attempt, devices_wrong, difference
from opdb.samples import tensors_of
from opdb.schema_cases import Case, apply, arguments_on, label, loose, specs
from opdb.schema_inputs import Call, Spec, names, overload
from opdb.search import Searcher
from torch_xla import _XLAC
from torch_xla._core.compile import cache
from torch_xla._core.execute import op_by_op
from torch_xla._core.lower import lowering
from torch_xla.debug import metrics
from torch_xla.ops import call, decompositions, fallback, host_kernel
from torch_xla.ops.call import way_of

_ON_CPU = r"(?i)(on|1D) (the )?CPU|CPU tensor"
KIND = "overload"  # of a job


@functools.cache
def _searcher() -> Searcher:
    return Searcher()


@dataclass
class Result:
    """What became of an overload.

    Attributes:
        op: The overload, as ``aten.add.Tensor``.
        status: A key of `overload_report.OUTCOMES`.
        messages: What differs, or why no argument set was found.
        accepted: Number of calls that the CPU accepts.
        refused: Number of calls that it refuses.
        gradients: Number of gradients compared.
        compiled: Number of programs compiled for them.
        host_ops: Operators that ran on the host.
        wording: Errors of the right type that say something else than the CPU's.
        way: How an overload that failed is lowered.
        known: Reasons of differences that are accepted.
        raised: What lowerings raised where the program calls the CPU kernel instead, or there is nothing to compute.
    """

    op: str
    dtype: str = ""
    kind: str = KIND
    status: str = "refused"
    messages: list[str] = field(default_factory=list)
    accepted: int = 0
    refused: int = 0
    gradients: int = 0
    compiled: int = 0
    host_ops: list[str] = field(default_factory=list)
    wording: list[str] = field(default_factory=list)
    way: str = ""
    known: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    def note(self, text: str | None, called: str) -> None:
        """Takes notice of a difference."""
        if text is None:
            return
        text = f"{text} [{called}]"
        reason = skips.accepted(self.op, text)
        if reason is None:
            self.messages.append(text)
        else:
            self.known.append(reason)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class Run(Case):
    """A case on the device.

    Attributes:
        got: What the device did.
    """

    got: Outcome = field(default_factory=Outcome)


def jobs(patterns: list[str] | None = None) -> list[Job]:
    """A job for each overload whose name fits a regular expression; neighbours apart, so that a part is a sample."""
    chosen = (n for n in names() if patterns is None or any(re.fullmatch(p, n) for p in patterns))
    return [Job(n, "", KIND) for n in sorted(chosen, key=lambda n: zlib.crc32(n.encode()))]


def check(name: str) -> Result:
    """Checks one overload."""
    result = Result(name)
    if any(
        str(a.type).startswith(("Storage", "Stream", "List[__torch__")) or a.name == "filename"
        for a in overload(name)._schema.arguments
    ):
        result.status, result.messages = "untried", ["takes a storage, a stream, packed parameters or a file"]
        return result
    actual = _searcher().find(name)
    cases = [Run(c.call, c.leaf, c.want, c.compared, c.cotangents) for c in actual.cases]
    result.refused = len(actual.refused)
    result.gradients = sum(c.leaf >= 0 for c in cases)
    result.accepted = len(cases) - result.gradients
    cache.clear()
    lowering._rules.clear()  # host callbacks are counted when an operator is lowered
    metrics.clear_counters()
    with (
        mock.patch.object(op_by_op, "run", lambda *_: False),  # the CPU would compute what is read
        mock.patch.object(host_kernel, "register", lambda: False),  # rules are what other devices have
        mock.patch.object(decompositions, "run", wraps=decompositions.run) as decomposed,
        mock.patch.object(fallback, "run", wraps=fallback.run) as called,
        mock.patch.object(call, "passed_over") as passed_over,
    ):
        cuts = _run(name, cases)
        result.raised = sorted({_raised(*c.args) for c in passed_over.call_args_list})
        callbacks = [str(c.args[0]._schema.name) for c in called.call_args_list]
    result.compiled = metrics.counter_value("UncachedCompile") or 0
    recorded = {n for n in metrics.counter_names() if n.startswith("xla::")}
    sparse = {id(c.call) for c in cases if c.leaf < 0 and _other_layout(c)}
    cases = [c for c in cases if not (_other_layout(c) or id(c.call) in sparse and c.got.error is not None)]
    other_layout = bool(actual.cases) and not cases
    for case in cases:
        result.note(_compare(name, case), _shown(case.call, case.leaf))
    if cases:
        result.way = _way(name, recorded, cuts, callbacks, bool(decomposed.called))
    result.host_ops = sorted({*cuts, *callbacks})
    _check_refused(name, actual.refused, result)
    if result.messages:
        result.status = "fail"
    elif other_layout:
        result.status = "layout"
    elif not cases:
        result.messages = [actual.error]
    else:
        result.status = result.way
    return result


def _raised(op: torch._ops.OpOverload, error: Exception) -> str:
    return f"{op}, by {way_of(str(op))}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _run(name: str, cases: list[Run]) -> set[str]:
    """Records all calls and computes them by one barrier, or by one each where that fails; the operators of cuts."""
    for case in cases:
        case.got = _recorded(name, case)
    cuts = host_ops()
    try:
        _compute(cases)
    except Exception:
        attempt(torch_xla.sync)  # what the failed program left pending
        for case in cases:
            case.got = _recorded(name, case)
            try:
                _compute([case])
            except Exception as error:
                attempt(torch_xla.sync)
                case.got = Outcome(error=RuntimeError(f"at the barrier: {error}"))
    return cuts


def _recorded(name: str, case: Case) -> Outcome:
    got = _attempt(name, case, None)
    if got.error is not None and re.search(_ON_CPU, str(got.error)):
        # Some arguments are on the CPU whatever the device: lengths, lists of numbers, bounds.
        others = [_attempt(name, case, k) for k, v in case.call.items() if isinstance(v, Spec)]
        refused = (o for o in others if not re.search(_ON_CPU, str(o.error)))
        got = next((o for o in others if o.error is None), next(refused, got) if case.want.error else got)
    return got


def _attempt(name: str, case: Case, host: str | None) -> Outcome:
    torch.manual_seed(0)
    return attempt(lambda: apply(name, case, arguments_on(name, case, "xla", host), case.cotangents, False))


def _compute(cases: list[Run]) -> None:
    tensors = [
        t for c in cases for t in tensors_of(c.got.value) if t.device.type == "xla" and t.layout == torch.strided
    ]
    _XLAC._xla_sync_multi(tensors)
    for case in cases:
        if case.got.error is None:
            wrong = None if case.leaf >= 0 or not specs(case.call) else devices_wrong(case.got.value[:1])
            case.got = Outcome(error=AssertionError(wrong)) if wrong else attempt(lambda c=case: fetch(c.got.value))


def _compare(name: str, case: Run) -> str | None:
    if case.want.error is not None or case.got.error is not None:
        return difference(label(name), case.want, case.got)
    want, have = case.want.value, case.got.value
    kind = case.compared or loose(name)
    if kind == "random":  # too few values for statistics
        kind = "uninitialized" if case.compared else ""
    judge: Callable[[Any, Any], str | None] = functools.partial(_judge, name, kind, case.leaf >= 0)
    if case.leaf >= 0:
        return judge(want, have)
    (results, arguments, shared), (results2, arguments2, shared2) = want, have
    text = judge(results, results2)
    if text is None:
        text = judge(arguments, arguments2)
        text = text and f"arguments afterwards: {text}"
    if text is None and shared != shared2:
        text = f"results share memory with arguments {shared2}, on the CPU with {shared}"
    return text


def _judge(name: str, kind: str, gradient: bool, want: Any, have: Any) -> str | None:
    narrow = (torch.bfloat16, torch.float16)
    if kind == "wide" and any(t.dtype in narrow for t in tensors_of(want)):
        kind = "uninitialized"
    if kind == "gauge" and not gradient:
        want, have = ([t.abs() for t in tensors_of(v)] for v in (want, have))
    if kind == "ties" and isinstance(want, (tuple, list)) and want and not want[0].is_floating_point():
        want, have = want[0], have[0]  # which of several equal elements is named is not defined
    with mock.patch.object(tolerances, "loose", lambda op: kind):
        return difference(label(name), Outcome(want), Outcome(have), gradient=gradient)


def _way(name: str, recorded: set[str], cuts: set[str], callbacks: list[str], decomposed: bool) -> str:
    if cuts:
        return "cut"
    if callbacks:
        return "callback"
    own = f"xla::{overload(name)._schema.name.removeprefix('aten::')}"
    rules = own in recorded or own.removesuffix("_") in recorded
    if rules and not decomposed:
        return "lowered"
    return "decomposed" if recorded else "recorder"


def _check_refused(name: str, refused: list[Case], result: Result) -> None:
    for case in refused:
        want, call = case.want, case.call
        if want.error is None:
            continue
        got = _recorded(name, case)
        text = difference(label(name), want, Outcome(error=got.error) if got.error else Outcome(0))
        done = attempt(torch_xla.sync)
        if text is None and done.error is not None:
            text = f"the barrier after it failed: {str(done.error)[:200]}"
        result.note(text, _shown(call, -1))
        if text is None and str(got.error) != str(want.error):
            result.wording.append(f"{str(got.error)[:200]} | CPU: {str(want.error)[:200]} [{_shown(call, -1)}]")


def _other_layout(case: Run) -> bool:
    """Whether the CPU gives a sparse, quantized or nested tensor, and the device refuses, or leaves it on the CPU."""
    return any(t.layout != torch.strided or t.is_quantized or t.is_nested for t in tensors_of(case.want.value)) and (
        case.got.error is not None
    )


def _shown(call: Call, leaf: int) -> str:
    text = ", ".join(f"{k}={v!r}" for k, v in call.items())
    return (f"gradient by tensor {leaf} of " if leaf >= 0 else "") + text[:400]
