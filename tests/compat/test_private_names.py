"""Names of the original that scripts use: what is known of a tensor, graphs as text, operators of XLA, counters."""

from __future__ import annotations

import importlib
import json
import re
import unittest
from pathlib import Path

import pytest
import torch
from conftest import Counting
from probes import python

import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.utils.utils as xu
from torch_xla import _XLAC
from torch_xla.debug import model_comparator
from torch_xla.experimental import eager_mode_context
from torch_xla.experimental.custom_kernel import repeat_with_fixed_output_size
from torch_xla.test import test_utils

X = torch.arange(6.0).reshape(2, 3)


def test_the_older_paths_lead_to_one_folder() -> None:
    assert importlib.import_module("torch_xla._XLAC") is _XLAC
    for path in ("debug.metrics_compare_utils", "core.xla_builder"):
        module = importlib.import_module(f"torch_xla.{path}")
        assert any(getattr(value, "__module__", "").startswith("torch_xla._legacy.") for value in vars(module).values())


def test_debug_info_of_pending_and_computed_tensors() -> None:
    y = X.to("xla").to(torch.bfloat16) + 1
    pending = _XLAC._get_xla_tensor_debug_info(y)
    assert "XLA Shape: bf16[2,3]" in pending and "aten::add" in pending and "XLAData: None" in pending
    torch_xla.sync()
    computed = _XLAC._get_xla_tensor_debug_info(y)
    assert "IR: None" in computed and "Data Shape: bf16[2,3]" in computed
    assert "Not a XLATensor" in _XLAC._get_xla_tensor_debug_info(X)


def test_graph_text_names_types_constants_and_computed_tensors() -> None:
    x = X.to("xla")
    lines = _XLAC._get_xla_tensors_text([torch.pow(x, 5)]).splitlines()
    assert lines[1].strip() == "%c0 = prim::Constant(), value=5"
    assert lines[2].strip() == "%p0 = xla::device_data(), f32[2,3]"
    assert "%0 = aten::pow.Tensor_Scalar(%p0, %c0), f32[2,3]" in lines[3]
    torch_xla.sync()
    assert "xla::device_data(), f32[2,3]" in _XLAC._get_xla_tensors_text([x])


def test_dot_general() -> None:
    a, b = torch.randn(4, 2, 3), torch.randn(4, 3, 5)
    product = _XLAC._xla_dot_general(a.to("xla"), b.to("xla"), (([2], [1]), ([0], [0])))
    torch.testing.assert_close(product.cpu(), a @ b)
    counted_back = _XLAC._xla_dot_general(a.to("xla"), b.to("xla"), (([-1], [-2]), ([0], [0])))
    assert torch.equal(counted_back.cpu(), product.cpu())
    half = _XLAC._xla_dot_general(
        a[0].half().to("xla"), b[0].half().to("xla"), (([1], [0]), ()), preferred_element_type=torch.float32
    )
    assert half.dtype == torch.float32
    with pytest.raises(ValueError, match=r"\[dot_general\]"):
        _XLAC._xla_dot_general(a.to("xla"), b.to("xla"), ([2], [1], [0]))


def test_optimization_barrier_stays_in_the_program() -> None:
    x = X.to("xla")
    y = x * 2
    xm.optimization_barrier_([y])
    assert "opt-barrier" in _XLAC._get_xla_tensors_hlo([y]) or "optimization_barrier" in xm.get_stablehlo([y])
    assert torch.equal(y.cpu(), X * 2)


def test_recorded_operators_are_counted(counted) -> None:
    x = X.to("xla")
    with counted("xla::mul", 3), counted("xla::sin", 1):
        y = x * 2
        y.mul_(3)
        torch.mul(x, 2, out=y)
        y.sin()
    assert met.counter_value("xla::mul") and "xla::mul" in met.counter_names()
    assert not [name for name in met.executed_fallback_ops() if name.startswith("xla::")]
    met.clear_counters()
    assert met.counter_value("xla::mul") is None


def test_eager_operations_have_metrics_of_their_own() -> None:
    x = (X + 17).reshape(3, 2).to("xla")
    with eager_mode_context(True):
        met.clear_all()
        for _ in range(2):
            x.logsumexp(0)
        xm.wait_device_ops()
        assert met.metric_data("EagerOpCompileTime")[0] <= 1
        assert met.metric_data("EagerOpExecuteTime")[0] == 2
        assert met.metric_data("ExecuteTime") is None
        torch_xla.compile(lambda t: t.exp().sin())(x)
        assert met.metric_data("EagerOpExecuteTime")[0] == 2 and met.metric_data("ExecuteTime")[0] == 1


@pytest.mark.compiled("programs write over inputs")
def test_donated_inputs_are_counted_per_compile() -> None:
    a, b = torch.randn(7, 13).to("xla"), torch.randn(7, 13).to("xla")
    torch_xla.sync()
    met.clear_metrics()
    c = a + b
    a *= 2
    b += 2
    torch_xla.sync()
    count, total, _ = met.metric_data("InputOutputAliasCount")
    assert (count, total) == (1, 2.0)
    assert torch.allclose(c.cpu() * 2, a.cpu() + (b.cpu() - 2) * 2, atol=1e-5)


def test_gradients_add_up_in_place(compiles) -> None:
    linear = torch.nn.Linear(5, 3, bias=False).to("xla")
    x = torch.randn(2, 5).to("xla")
    met.clear_metrics()
    with compiles(2):  # the first gradient, and one that is added to it
        for _ in range(4):
            linear(x).sum().backward()
            torch_xla.sync()
        grad = linear.weight.grad.cpu()
    assert met.metric_data("InputOutputAliasCount")[:2] == (2, 1.0)
    torch.testing.assert_close(grad, 4 * x.cpu().sum(0).expand(3, 5))


@pytest.mark.compiled("programs write over inputs")
def test_a_given_buffer_is_written_over_and_its_tensor_lost() -> None:
    x, y = torch.randn(7, 3).to("xla"), torch.randn(7, 3).to("xla")
    copy, total = x.cpu(), x.cpu() + y.cpu()
    assert _XLAC._set_buffer_donation(x, True) and _XLAC._get_buffer_donation(x)
    assert not _XLAC._get_buffer_donation(y)
    torch_xla.sync()
    z = x + y
    met.clear_metrics()
    torch_xla.sync()
    assert met.metric_data("InputOutputAliasCount")[1] == 1.0
    assert _XLAC._is_placecholder(x) and not _XLAC._is_placecholder(y)
    for use in (lambda: x + 1, x.cpu):
        with pytest.raises(RuntimeError, match=r"\[donation\]"):
            use()
    assert torch.equal(z.cpu(), total)
    x.copy_(copy)
    assert torch.equal(x.cpu(), copy) and not _XLAC._is_placecholder(x)


@pytest.mark.own_client("a plugin need not tell of its memory")
def test_placeholders_are_traced_and_have_no_values(counted: Counting) -> None:
    held = xm.get_memory_info(torch.device("xla", 0))["bytes_used"]
    p, q = (xb.create_placeholder_tensor((1 << 14, 1 << 14), torch.bfloat16) for _ in range(2))
    assert (p.device.type, p.dtype, p.shape) == ("xla", torch.bfloat16, (1 << 14, 1 << 14))
    assert _XLAC._is_placecholder(p) and not _XLAC._is_placecholder(p + 1)
    assert xm.get_memory_info(torch.device("xla", 0))["bytes_used"] < held + 2**29
    assert len(set(_XLAC._get_tensors_handle([p, q, p]))) == 2
    product = (p @ q) @ q.T
    assert _XLAC._get_xla_tensors_text([product]).count("xla::device_data(), bf16[16384,16384]") == 2
    assert "dot(" in _XLAC._get_xla_tensors_hlo([product])
    with pytest.raises(RuntimeError, match=r"\[tensor\] got a placeholder"):
        p.cpu()
    with pytest.raises(RuntimeError, match=r"\[tensor\] got a placeholder"):
        product[:2].cpu()
    product = p * 2
    x = torch.arange(3.0).to("xla") + 1
    torch_xla.sync()  # leaves alone what only can be traced
    with counted("CachedCompile", 0), counted("UncachedCompile", 0):
        assert x.tolist() == [1.0, 2.0, 3.0]
    assert "mul" in _XLAC._get_xla_tensors_text([product])


def test_giving_a_buffer_away_leaves_others_theirs() -> None:
    x = torch.randn(7, 3).to("xla")
    values = x.cpu()
    clone = x.clone()
    assert _XLAC._set_buffer_donation(x, True)
    y = x + 1
    torch_xla.sync()
    assert torch.equal(clone.cpu(), values) and torch.equal(y.cpu(), values + 1)
    with pytest.raises(RuntimeError, match=r"\[donation\] got a tensor whose buffer was given"):
        x.cpu()
    assert not _XLAC._set_buffer_donation(clone * 2, True)  # pending
    assert not _XLAC._set_buffer_donation(clone[1:], True)


def test_programs_for_some_tensors_take_given_buffers_on_request() -> None:
    for on in (False, True):
        _XLAC._xla_set_enable_alias_with_buffer_donor_config(on)
        try:
            x = torch.randn(5, 3).to("xla")
            assert _XLAC._set_buffer_donation(x, True)
            y = x * 3
            _XLAC._xla_sync_multi([x, y], ["xla:0"], True, False)
            assert _XLAC._is_placecholder(x) == on == _XLAC._xla_get_enable_alias_with_buffer_donor_config()
        finally:
            _XLAC._xla_set_enable_alias_with_buffer_donor_config(False)


def test_hlo_text_names_instructions_and_types() -> None:
    x = X.to("xla").to(torch.bfloat16)
    hlo = _XLAC._get_xla_tensors_hlo([x.float().exp()])
    assert re.search(r"%convert\S* = f32\[2,3\].* convert\(bf16\[2,3\]", hlo)
    assert re.search(r"%exponential\S* = f32\[2,3\].* exponential\(f32\[2,3\]", hlo)


def test_a_program_with_its_inputs() -> None:
    x, y = X.to("xla"), torch.full((3,), 2.5, device="xla")
    torch_xla.sync()
    context = _XLAC.lowering.LoweringContext("sums")
    with pytest.raises(RuntimeError, match=r"\[lowering\]"):
        context.hlo()
    context.build([x * 1.5 + y])
    module = json.loads(context.hlo_json())
    assert "sums" in module["name"] and isinstance(context.hlo(), bytes)
    shapes = [(p["elementType"], p.get("dimensions")) for p in module["hostProgramShape"]["parameters"]]
    assert shapes == [("F32", ["2", "3"]), ("F32", ["3"]), ("F64", ["1"])]
    assert all(f'opcode: "{name}"' in context.hlo_text() for name in ("parameter", "multiply", "add"))
    for mapping in (context.parameter_id_tensor_mapping(), context.device_parameter_id_tensor_mapping()):
        assert [t.tolist() for t in mapping.values()] == [X.tolist(), [2.5] * 3, [1.5]]
    assert mapping[0].device.type == "xla"


def test_execution_may_be_forbidden() -> None:
    x = X.to("xla") + 1
    _XLAC._set_allow_execution(False)
    try:
        assert not _XLAC._get_allow_execution()
        with pytest.raises(RuntimeError, match="Unexpected execution happens inside the compiled function, exiting"):
            x.cpu()
    finally:
        _XLAC._set_allow_execution(True)
    assert torch.equal(x.cpu(), X + 1)


def test_devices_may_be_counted_after_the_import() -> None:
    program = """
import os, torch, torch_xla
os.environ["CPU_NUM_DEVICES"] = "3"
assert torch_xla.device_count() == 3
assert torch.ones(2, device=torch_xla.device(2)).sum().item() == 2
"""
    python("-c", program, imported=True, CPU_NUM_DEVICES="1", JAX_NUM_CPU_DEVICES="3")


def test_a_tensor_that_no_machine_can_hold() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"\[memory\] got a tensor of 4503599627370496 bytes"):
        torch.rand(1024, 1024, 1024, 1024, 1024, device="xla")


def test_repeats_of_a_fixed_length(counted) -> None:
    x, repeats = torch.arange(4.0), torch.tensor([0, 3, 1, 2])
    full = x.repeat_interleave(repeats)
    for length in (4, 6, 9):
        expected = torch.cat((full, full[-1:].expand(max(length - 6, 0))))[:length]
        assert torch.equal(repeat_with_fixed_output_size(x.to("xla"), repeats.to("xla"), length).cpu(), expected)


def test_both_walks_over_containers_have_one_order() -> None:
    data = {2.3: 11, "w": [12, {"a": ("f", 17)}]}
    seen, rewritten = [], []
    xu.for_each_instance(data, lambda v: isinstance(v, (int, float, str)), seen.append)
    xu.for_each_instance_rewrite(data, lambda v: isinstance(v, (int, float, str)), lambda v: rewritten.append(v) or v)
    assert seen == rewritten == [2.3, 11, "w", 12, "a", "f", 17]


def test_runs_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for i, folder in enumerate(folders):
        folder.mkdir()
        model_comparator.configure(str(folder))
        values = (X + (i == 2)).to("xla" if i else "cpu")
        assert model_comparator.save("first", values) is values
        model_comparator.save(None, X, step=3)
        if i != 2:
            model_comparator.save("first", X)
    model_comparator.configure(None)
    assert model_comparator.compare(folders[0], folders[1]) == ""
    report = model_comparator.compare(folders[0], folders[2])
    assert "first.1 is not in" in report and "first.0" in report and "error 1" in report
    assert "different shapes" in model_comparator.compare_tensors(X, X.T)
    assert model_comparator.compare_tensors(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0])) == ""


def test_a_test_in_a_process_of_its_own() -> None:
    class Case(unittest.TestCase):
        @test_utils.mp_test
        def good(self) -> None:
            pass

        @test_utils.mp_test
        def bad(self) -> None:
            raise SystemExit(3)

    assert Case("good").good() == 0
    with pytest.raises(AssertionError):
        Case("bad").bad()


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[tuple[str, float]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int | None) -> None:
            written.append((name, value))

    test_utils.print_training_update("xla:0", 3, 0.5, 10.0, 9.0, epoch=1, summary_writer=Writer())
    test_utils.print_test_update("xla:0", 97.5, epoch=1)
    lines = capsys.readouterr().out.splitlines()
    assert "Training Device=xla:0/0 Epoch=1 Step=3 Loss=0.50000 Rate=10.00" in lines[0]
    assert "Accuracy=97.50" in lines[1]
    assert dict(written) == {"examples/sec": 10.0, "average_examples/sec": 9.0}
