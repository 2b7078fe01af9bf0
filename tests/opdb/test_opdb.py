"""A fixed sample of the operator sweep, and what must hold of its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from opdb import cases, report, skips, tolerances
from opdb.cases import Job
from opdb.check import check
from opdb.compare import Outcome, difference
from opdb.runner import run
from opdb.samples import choose, copy, tensors_of
from torch_xla.ops import registry


def jobs() -> Iterator[Any]:
    """All candidates; those whose turn it is not are left to the sweep."""
    taken = cases.sample()
    for job in cases.candidates():
        marks = [] if job in taken else [pytest.mark.sweep]
        yield pytest.param(job, marks=marks, id=f"{job.op}-{job.dtype}-{job.kind}")


@pytest.mark.parametrize("job", list(jobs()))
def test_operator(job):
    result = check(job)
    known = skips.reason(job, skips.KNOWN)
    if known is not None:
        assert result.status in report.BAD, "passes now: take it out of KNOWN"
        pytest.xfail(known)
    assert result.status not in report.BAD, "\n".join(result.messages)


def test_the_sample_has_every_family_dtype_and_kind():
    sample = cases.candidates()
    assert {cases.family(job.op) for job in sample} == {cases.family(name) for name in cases.operators()}
    assert {job.dtype for job in sample} == set(cases.DTYPES)
    assert {job.kind for job in sample} == set(cases.KINDS)
    assert len(set(sample)) == len(sample)
    taken = cases.sample()
    assert taken < set(sample) and {cases.family(job.op) for job in taken} == {cases.family(job.op) for job in sample}


def test_every_skip_and_every_tolerance_has_a_reason_and_a_use():
    names = list(cases.operators())
    for entry in (*skips.SKIPS, *skips.KNOWN, *tolerances.WIDER, *tolerances.ROUNDED, *tolerances.LOOSE):
        assert len(entry.reason) > 10, entry
        assert any(re.fullmatch(entry.ops, name) for name in names), f"{entry} is for no operator"


def test_samples_are_the_same_every_time_and_have_the_edges():
    job = Job("add", "float32", "forward")
    first, second = choose(job), choose(job)
    assert [s.text for s in first] == [s.text for s in second]
    for a, b in zip(tensors_of([s.args for s in first]), tensors_of([s.args for s in second]), strict=True):
        assert torch.equal(a, b)
    tensors = list(tensors_of([s.args for s in first]))
    assert any(t.numel() == 0 for t in tensors)
    assert any(t.dim() == 0 for t in tensors)
    assert any(not t.is_contiguous() for t in tensors)
    assert any(len({t.shape for t in tensors_of(s.args)}) > 1 for s in first)


def test_copies_keep_strides_and_gaps():
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base.t(), base[1:, ::2], base[:1].expand(3, 6), torch.view_as_complex(base.reshape(4, 3, 2)).conj()):
        there = copy(view, "xla")
        assert there.device.type == "xla"
        assert there.stride() == view.stride()
        assert there.storage_offset() == view.storage_offset()
        assert torch.equal(there.cpu(), view)


@pytest.mark.parametrize(
    ("expected", "got", "says"),
    [
        (torch.ones(2), torch.ones(2) + 1e-3, "not close"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2), torch.ones(1, 2), "shape"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "not equal"),
        ((torch.ones(1), 3), (torch.ones(1), 4), "result[1]"),
        ([True], [False], "result[0]"),
        (torch.tensor(torch.nan), torch.tensor(0.0), "not close"),
    ],
)
def test_a_difference_is_found(expected, got, says):
    assert says in difference("add", Outcome(expected), Outcome(got))
    assert difference("add", Outcome(expected), Outcome(expected)) is None


def test_exceptions_are_compared_by_type():
    assert difference("add", Outcome(error=ValueError("a")), Outcome(error=ValueError("b"))) is None
    assert "IndexError" in difference("add", Outcome(error=ValueError("a")), Outcome(error=IndexError("a")))
    assert "did not raise" in difference("add", Outcome(error=ValueError("a")), Outcome(1))
    assert "CPU gives a value" in difference("add", Outcome(1), Outcome(error=ValueError("a")))


def test_means_of_random_results_are_compared():
    torch.manual_seed(0)
    a, b = torch.randn(500), torch.randn(500)
    assert difference("randn", Outcome(a), Outcome(b), drawn=True) is None
    assert "mean" in difference("randn", Outcome(a), Outcome(b + 1), drawn=True)


@pytest.mark.slow
def test_a_dead_worker_is_a_result_and_the_next_job_runs(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'opdb.worker':\n"
        f"            marks = sorted(os.listdir({str(tmp_path)!r}))\n"
        "            if 'died' not in marks:\n"
        f"                open({str(tmp_path / 'died')!r}, 'w').close(); os.abort()\n"
        "            if 'hung' not in marks:\n"
        f"                open({str(tmp_path / 'hung')!r}, 'w').close(); time.sleep(600)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = []

    def done(result):  # the second one hangs, and is not waited for as long
        results.append(result)
        monkeypatch.setattr("opdb.runner._START_UP", 3 if len(results) == 1 else 60)

    jobs = [Job(op, "float32", "forward") for op in ("neg", "exp", "abs")]
    run(jobs, workers=1, limit=1, done=done)
    assert [(r["op"], r["status"]) for r in results] == [("neg", "crash"), ("exp", "hang"), ("abs", "pass")]
    assert "SIGABRT" in results[0]["messages"][0]


def test_the_report_names_what_failed():
    good = {"op": "add", "dtype": "float32", "kind": "forward", "status": "pass", "messages": [], "host_ops": []}
    bad = {**good, "dtype": "bool", "status": "fail", "messages": ["result: shape [2], CPU gives [3]"]}
    text = report.text([good, bad])
    assert "1 of 2 (50.0 %)" in text
    assert "| add | bool/forward | fail: result: shape [2], CPU gives [3] |" in text
    assert report.failures([good, bad]) == {"add": {"bool/forward": "fail: result: shape [2], CPU gives [3]"}}


def test_a_rule_that_only_cpus_have_is_found(monkeypatch):
    def rule(ctx, x):
        return x * jax.lax.linalg.schur(jnp.eye(2, dtype=x.dtype))[0][0, 0]

    job = Job("neg", "float32", "platform")
    assert check(job).status == "pass"
    monkeypatch.setitem(registry._RULES, "aten.neg.default", rule)
    result = check(job)
    assert result.status == "fail"
    assert any(text.startswith("tpu: LoweringError") or "tpu: NotImpl" in text for text in result.messages)
