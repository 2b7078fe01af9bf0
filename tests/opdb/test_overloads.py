"""A fixed sample of the sweep over the overloads of aten, and what must hold of its tables."""

from __future__ import annotations

import re

import pytest
import torch

from opdb import overload_report, overloads, report, skips
from opdb.__main__ import updated
from opdb.schema_inputs import names, overload, written
from torch_xla.ops import registry

# One of each outcome, and of each form of an operator.
OUTCOMES = {
    "aten.tan.default": "lowered",
    "aten.addmm_.default": "lowered",
    "aten.special_zeta.other_scalar_out": "lowered",
    "aten.trapezoid.dx": "decomposed",
    "aten._foreach_mul.List_out": "decomposed",
    "aten.promote_types.default": "recorder",
    "aten.special_airy_ai.out": "callback",
    "aten.nonzero.default": "cut",
    "aten.to_sparse_csr.default": "layout",
    "aten.cudnn_convolution.default": "refused",
    "aten.quantized_lstm.input": "untried",
}
_EVERY = 400


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize(("name", "outcome"), OUTCOMES.items(), ids=list(OUTCOMES))
def test_outcome(name, outcome):
    result = overloads.check(name)
    assert result.status == outcome, "\n".join(result.messages)


@pytest.mark.parametrize("name", [job.op for job in overloads.jobs()[::_EVERY]])
def test_overload(name):
    result = overloads.check(name)
    assert result.status not in report.BAD, "\n".join(result.messages)


def test_the_sample_has_every_outcome_and_form():
    assert set(OUTCOMES.values()) == set(overload_report.OUTCOMES) - set(report.BAD)
    forms = {(bool(written(op)), any(a.is_out for a in op._schema.arguments)) for op in map(overload, OUTCOMES)}
    assert forms == {(False, False), (True, False), (True, True)}


def test_every_overload_is_a_job():
    assert sorted(job.op for job in overloads.jobs()) == list(names())
    assert len(names()) > 2500


@pytest.mark.parametrize("entry", skips.DIFFERENCES, ids=lambda entry: entry.ops[:40])
def test_every_accepted_difference_has_a_reason_and_a_use(entry):
    assert len(entry.reason) > 10
    assert any(re.fullmatch(entry.ops, name) for name in names())
    assert entry.ops != ".*" or entry.text, "accepts everything"
    for difference in ("Tensor-likes are not close! nan", "Tensor-likes are not equal!", "Scalars are not close!"):
        assert re.search(r"\d", entry.reason) or not re.search(entry.text, difference), "values differ: say by how much"


def test_a_wrong_value_is_found(monkeypatch):
    monkeypatch.setitem(registry._RULES, "aten.tan.default", lambda ctx, x: x)
    result = overloads.check("aten.tan.default")
    assert result.status == "fail"
    assert "not close" in result.messages[0]


def test_what_a_rule_raises_is_told(monkeypatch):
    def rule(ctx, x):
        raise ValueError("does not take it")

    assert not overloads.check("aten.tan.default").raised
    monkeypatch.setitem(registry._RULES, "aten.tan.default", rule)
    result = overloads.check("aten.tan.default")
    assert result.status == "callback"
    assert result.raised == ["aten.tan.default, by rule: ValueError: does not take it"]
    text = overload_report.text([result.as_dict()])
    assert "| aten.tan.default, by rule | ValueError: does not take it |" in text


def test_a_call_that_should_be_refused_is_found():
    spec = overloads.Spec(torch.float32, (2, 3))
    case = overloads.Case({"self": spec}, -1, overloads.Outcome(error=RuntimeError("refused")))
    result = overloads.Result("aten.tan.default")
    overloads._check_refused(result.op, [case], result)
    assert result.messages and "did not raise" in result.messages[0]


def test_the_report_names_what_differs():
    good = overloads.Result("aten.add.Tensor", status="lowered", accepted=5).as_dict()
    bad = overloads.Result("aten.add_.Tensor", status="fail", messages=["result: shape [2], CPU gives [3]"]).as_dict()
    text = overload_report.text([good, bad])
    assert "| lowered | by a rule | 1 | 0 | 0 | 1 |" in text
    assert "| add_.Tensor | fail | result: shape [2], CPU gives [3] |" in text


def test_a_run_replaces_its_own_part_of_the_report():
    database = report.text([])
    results = (overloads.Result("aten.add.Tensor", status=status).as_dict() for status in ("cut", "lowered"))
    first, second = (overload_report.text([r]) for r in results)
    both = updated(database, first, overloads_run=True)
    assert both == database.rstrip() + "\n\n" + first
    assert updated(both, second, overloads_run=True) == database.rstrip() + "\n\n" + second
    assert updated(both, database, overloads_run=False) == both
    assert updated("", database, overloads_run=False) == database
