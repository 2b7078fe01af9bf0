"""Values that are read: small graphs behind them are computed on the host, others compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Counting
from probes import python, sampled, setting

import torch_xla
from torch_xla import _bindings, _config
from torch_xla.ops import registry

pytestmark = [
    pytest.mark.compiled("it is what these tests are about", reads=False),
    pytest.mark.usefixtures("nothing_compiled"),
]


class TestSmall:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16, torch.int64])
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x * 0.1,
            lambda x: 0.1 - x,
            lambda x: x / 0.7,
            lambda x: torch.where(x == 3, 0.1, x),
            lambda x: x + torch.full_like(x, 0.1),
            lambda x: (x * 0.1) == 0.1,
            lambda x: x[0] * 0.1,
        ],
    )
    def test_numbers_are_as_precise_as_what_they_meet(
        self, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, compiles: Counting
    ) -> None:
        x = torch.tensor([1, 3, 7], dtype=dtype)
        with compiles(0):
            result = function(x.to("xla")).cpu()
        torch.testing.assert_close(result, function(x), rtol=0, atol=0)

    def test_an_entry_at_a_position_that_changes(self, counted: Counting, compiles: Counting) -> None:
        timesteps = torch.arange(980, -20, -50).to("xla")
        with compiles(0), counted("HostCompute", 20), sampled("ExecuteTime", 0):
            read = [timesteps[i].item() for i in range(20)]
        assert read == list(range(980, -20, -50))

    def test_types_that_the_cpu_does_not_mix(self) -> None:
        x, weight = torch.randn(2, 3).bfloat16(), torch.ones(3).bfloat16()

        def gradient(device: str) -> torch.Tensor:
            y = x.to(device, copy=True).requires_grad_()
            torch.nn.functional.layer_norm(y, (3,), weight.to(device)).prod().backward()
            assert y.grad is not None
            return y.grad.cpu()  # of statistics in float32, unlike on the CPU

        torch.testing.assert_close(gradient("xla"), gradient("cpu"), rtol=0.05, atol=0.05)

    def test_rows_of_a_larger_tensor(self, compiles: Counting) -> None:
        table = torch.arange(40_000.0).view(1000, 40)
        on_device = table.to("xla")
        with compiles(0):
            for i in range(0, 1000, 50):
                torch.testing.assert_close(on_device[i, ::2].cpu(), table[i, ::2], rtol=0, atol=0)

    def test_a_check_of_a_mask(self, compiles: Counting) -> None:
        mask = torch.ones(2, 128, dtype=torch.int64).to("xla")
        with compiles(0):
            assert (mask == 1).all()
            assert not (mask[:, :5] == 0).any()
            assert mask.sum().item() == 256

    def test_kernels_that_read_memory_in_order_get_it_so(self, compiles: Counting) -> None:
        def group_norm_backward(t: torch.Tensor) -> torch.Tensor:
            grad = t.sum(0, keepdim=True).expand(4, 6, 10).contiguous()
            _, mean, rstd = torch.native_group_norm(t, None, None, 4, 6, 10, 2, 1e-5)
            expected = [True, False, False]
            return torch.ops.aten.native_group_norm_backward(grad, t, mean, rstd, None, 4, 6, 10, 2, expected)[0]

        x = torch.arange(240.0).view(4, 6, 10).sin()
        for function in (
            lambda t: torch.nn.functional.group_norm(t.transpose(0, 1), 2),
            lambda t: torch.nn.functional.layer_norm(t.permute(2, 0, 1), (6,)),
            lambda t: torch.nn.functional.batch_norm(t.transpose(1, 2), None, None, training=True),
            group_norm_backward,
            lambda t: t.mT.as_strided((3, 5), (7, 2)),
            lambda t: t.transpose(0, 2).view(torch.int32),
        ):
            with compiles(0):
                result = function(x.to("xla")).cpu()
            torch.testing.assert_close(result, function(x))

    def test_control_flow_on_a_value(self, compiles: Counting) -> None:
        x = torch.tensor(3.5).to("xla")
        steps = 0
        with compiles(0):
            while x > 0.5:
                x = x - 1
                steps += 1
        assert steps == 3

    def test_a_value_that_was_read_is_computed_once(self, counted: Counting) -> None:
        x = torch.arange(6.0).to("xla") * 2.5
        with counted("HostCompute", 1):
            assert x.tolist() == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5]
            assert x.sum().shape == ()
            assert x.tolist()[1] == 2.5

    def test_a_program_that_has_finished_is_not_waited_for(self) -> None:
        x = torch.arange(40_000.0).to("xla")
        y = x * 2.5
        torch_xla.sync()
        while not _bindings.in_flight(0).idle:
            time.sleep(0.001)
        value, computed = _bindings.read_directly(y[3])
        assert (value.item(), computed) == (7.5, True)

    def test_later_graphs_take_it_from_the_device(self, compiles: Counting) -> None:
        x = torch.arange(6.0).to("xla") * 2.5
        assert x[1].item() == 2.5
        y = x.sin()
        with compiles(1):
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), (torch.arange(6.0) * 2.5).sin())

    def test_a_constant_that_is_written_later_stays_one(self) -> None:
        for _ in range(3):
            x = torch.arange(5, device="xla")
            assert x.tolist() == [0, 1, 2, 3, 4]
            x.add_(7)
            torch_xla.sync()
            assert x.tolist() == [7, 8, 9, 10, 11]

    def test_values_agree_with_the_device(self) -> None:
        x = torch.linspace(-2, 2, 30).reshape(5, 6)
        for function in (torch.softmax, torch.cumsum, torch.argmax, torch.amax):
            on_host = function(x.to("xla"), 1).cpu()
            on_device = function(x.to("xla"), 1)
            torch_xla.sync()
            torch.testing.assert_close(on_host, on_device.cpu())
            torch.testing.assert_close(on_host, function(x, 1))

    def test_it_stays_on_its_device(self) -> None:
        x = torch.arange(4.0).to("xla:2") * 2.5
        assert x[1].item() == 2.5
        assert (x.device, (x + 1).tolist()) == (torch.device("xla:2"), [1.0, 3.5, 6.0, 8.5])


class TestOthers:
    def test_many_values_are_compiled(self, counted: Counting, compiles: Counting) -> None:
        x = torch.arange(40_000.0).to("xla")
        with compiles(1), counted("HostCompute", 0):
            assert (x * 2.5).sum().item() == pytest.approx(2.5 * 39_999 * 20_000)

    def test_as_many_are_computed_where_there_are_no_inputs(self, counted: Counting, compiles: Counting) -> None:
        """The check for packed sequences that transformers makes in each step of training."""
        x = torch.arange(40_000.0).to("xla")
        for _ in range(2):
            y = x.sin()
            positions = torch.arange(1024, device="xla").expand(8, -1)
            steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
            with compiles(0), counted("HostCompute", 1):
                assert ((steps != 1).cumsum(-1)[:, -1] == 0).all()
            assert _bindings.buffer_of(y) is None

    def test_many_operators_are_compiled(self, counted: Counting, compiles: Counting) -> None:
        x = torch.arange(4.0).to("xla")
        y = x
        for _ in range(30):
            y = (y + 1).sin()
        with compiles(1), counted("HostCompute", 0):
            y.tolist()

    def test_random_numbers_are_the_devices(self, counted: Counting, compiles: Counting) -> None:
        with compiles(1), counted("HostCompute", 0):
            value = torch.rand((), device="xla").item()
        assert 0 <= value < 1

    def test_a_barrier_never_computes_on_the_host(self, counted: Counting, compiles: Counting) -> None:
        x = torch.arange(4.0).to("xla") * 2.5
        with compiles(1), counted("HostCompute", 0):
            torch_xla.sync()
        assert x.tolist() == [0.0, 2.5, 5.0, 7.5]

    def test_a_computed_value_is_only_copied(self, counted: Counting, compiles: Counting) -> None:
        x = torch.arange(4.0).to("xla")
        with compiles(0), counted("HostCompute", 0), sampled("TransferFromDeviceTime", 1):
            assert x.tolist() == [0.0, 1.0, 2.0, 3.0]

    def test_reading_inside_a_step_leaves_the_rest_pending(self, compiles: Counting) -> None:
        x = torch.arange(40_000.0).to("xla")
        flag = torch.tensor([3, 4]).to("xla")
        y = x.sin()
        with compiles(0):
            assert flag.max().item() == 4
        assert _bindings.buffer_of(y) is None
        with compiles(1):
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), torch.arange(40_000.0).sin())

    def test_where_it_is_switched_off_all_are_compiled(self, counted: Counting, compiles: Counting) -> None:
        x = torch.arange(4.0).to("xla")
        with setting(_config.XLA_HOST_COMPUTE, "never"), compiles(1), counted("HostCompute", 0):
            assert (x * 2.5).tolist() == [0.0, 2.5, 5.0, 7.5]
        with compiles(0), counted("HostCompute", 1):
            assert (x * 3.5).tolist() == [0.0, 3.5, 7.0, 10.5]

    def test_an_operator_without_a_cpu_kernel_goes_by_its_rule(
        self, monkeypatch: pytest.MonkeyPatch, counted: Counting, compiles: Counting
    ) -> None:
        monkeypatch.setitem(registry._RULES, "hostless.double.default", lambda ctx, x: x * 2)
        with torch.library._scoped_library("hostless", "DEF") as library, compiles(0), counted("OperatorsByRule", 1):
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", torch.empty_like, "Meta")
            assert torch.ops.hostless.double(torch.arange(3.0).to("xla")).tolist() == [0.0, 2.0, 4.0]


TESTS = """
import os, pytest, torch, torch_xla

def run(expected=""):
    large = torch.ones(3000).to("xla") + 1
    torch_xla.sync()
    assert (torch.arange(3.0).to("xla") * 2.5).tolist() == [0.0, 2.5, 5.0]
    names = ("UncachedCompile", "UncompiledRun", "HostCompute")
    assert [name for name in names if torch_xla._metrics.counter(name)] == expected.split()
    torch_xla._metrics.clear_counters()
    torch_xla._core.compile.cache.clear()

@pytest.mark.compiled("reason")
def test_compiled():
    run("UncachedCompile")

@pytest.mark.compiled("reason")
def test_not_compiled(monkeypatch):
    monkeypatch.setenv("XLA_HOST_COMPUTE", "reads")
    (torch.arange(3.0).to("xla") * 3.5).tolist()

@pytest.mark.compiled("reason", reads=False)
def test_apart_from_reads():
    run("UncachedCompile HostCompute")

@pytest.mark.by_default("reason")
def test_by_default():
    run("UncompiledRun HostCompute")

def test_in_turn():
    run("UncompiledRun HostCompute")

def test_that_counts(compiles):
    run("UncachedCompile")
"""


@pytest.mark.costs("it runs pytest")
def test_a_test_that_compiles_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    program = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-rE", "--way=default", "test_it.py"]
    done = python("-c", program, *options, cwd=tmp_path, check=False, imported=True)
    assert "1 error" in done.stdout and "ERROR test_it.py::test_not_compiled" in done.stdout
    assert "6 passed" in done.stdout, done.stdout
