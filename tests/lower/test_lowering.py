"""Lowering: what the StableHLO of a graph holds, what it leaves out, and what goes wrong with a rule by name."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import pytest
import torch
import torch.nn as nn
from conftest import Counting
from probes import cut_of, here, sampled

import torch_xla
from torch_xla import _XLAC, _bindings
from torch_xla._core.compile import cache
from torch_xla._core.execute.export import graph_text, lowered
from torch_xla._core.lower import lowering
from torch_xla._core.lower.calling_convention import ProgramSignature
from torch_xla.core import xla_model as xm
from torch_xla.ops import registry


def stablehlo(*tensors: torch.Tensor) -> str:
    return xm.get_stablehlo(list(tensors))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(0, 1, 6).reshape(2, 3).to("xla")


LIBRARY = torch.library.Library("stage", "DEF")
LIBRARY.define("probe(Tensor x, Scalar a=2.5) -> Tensor")
LIBRARY.define("powered(Tensor x, Scalar a) -> Tensor")
LIBRARY.define("shifted(Tensor x, Scalar a) -> Tensor")
for _name in ("probe", "powered", "shifted"):
    LIBRARY.impl(_name, lambda x, a=2.5: torch.empty_like(x), "Meta")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No rule was traced and no graph compiled: another test gives the same operator another rule."""
    lowering._rules.clear()
    cache.clear()
    yield
    torch_xla.sync()


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Gives an operator a rule for one test."""

    def give(name: str, rule: Any) -> None:
        monkeypatch.setitem(registry._RULES, name, rule)

    return give


class TestProgram:
    def test_a_function_per_signature_not_per_node(self, x: torch.Tensor) -> None:
        y = x
        for _ in range(50):
            y = torch.tanh(y * 1.2345) + 2.5
        text = stablehlo(y)
        assert text.count("func.func private") == 3
        assert len(re.findall(r"call @aten_tanh_default\b", text)) == 50

    def test_another_shape_is_another_signature(self, x: torch.Tensor) -> None:
        text = stablehlo(x.tanh(), x[0].tanh(), x.cos().tanh())
        assert len(re.findall(r"func.func private @aten_tanh_default", text)) == 2

    def test_rules_are_traced_once_per_process(self, x: torch.Tensor, rule: Callable[[str, Any], None]) -> None:
        traced: list[int] = []
        erfinv = registry.rule_for("aten.erfinv.default")
        assert erfinv is not None

        def counting(ctx: Any, value: Any) -> Any:
            traced.append(1)
            return erfinv(ctx, value)

        rule("aten.erfinv.default", counting)
        y = x[:, :1].expand(2, 17)
        stablehlo(y.erfinv().erfinv())
        stablehlo(y.erfinv().sin().erfinv())
        assert len(traced) == 1

    def test_numbers_are_inputs(self, x: torch.Tensor) -> None:
        text = stablehlo(x * 1.2345 + 678)
        assert "1.2345" not in text
        assert "678" not in text
        main = next(line for line in text.splitlines() if "@main(" in line)
        assert "tensor<1xf64>" in main
        assert "tensor<1xi64>" in main

    def test_the_program_of_another_number_is_the_same(self, x: torch.Tensor) -> None:
        assert stablehlo(x * 1.5) == stablehlo(x * 2.5)

    def test_the_module_is_named_after_the_region(self, x: torch.Tensor) -> None:
        assert lowering.lower(cut_of(x.sin()), "training").stage.as_text().startswith("module @jit_training")

    def test_64_bit_types_are_kept(self, x: torch.Tensor) -> None:
        text = stablehlo(x.double().sum() + torch.arange(3, device="xla").sum())
        assert "tensor<2x3xf64>" in text
        assert "tensor<3xi64>" in text
        assert not jax.config.jax_enable_x64

    def test_donated_inputs_are_marked(self, x: torch.Tensor) -> None:
        torch_xla.sync()
        x.mul_(2.5)
        text = graph_text([], "stablehlo")
        assert len(re.findall(r"tf\.aliasing_output|jax\.buffer_donor", text)) == 1
        torch_xla.sync()

    def test_an_overwritten_input_is_paired_with_what_takes_its_place(self) -> None:
        x, y = (torch.randn(5000).to("xla") for _ in range(2))  # too large for a pack
        torch_xla.sync()
        z = x * y
        y.mul_(2.5)
        x.mul_(2.5)
        main = next(line for line in graph_text([], "stablehlo").splitlines() if "@main(" in line)
        assert re.findall(r"tf\.aliasing_output = (\d)", main) == ["2", "1"], main  # z is first
        torch_xla.sync()
        torch.testing.assert_close(z.cpu(), x.cpu() / 2.5 * (y.cpu() / 2.5))

    def test_several_overwritten_inputs_with_one_successor(self) -> None:
        tensors = [torch.randn(5000).to("xla") for _ in range(3)]
        torch_xla.sync()
        expected = tensors[0].cpu() * 2.5
        total = tensors[0] + tensors[1] + tensors[2]
        tensors[0].mul_(2.5)
        for tensor in tensors[1:]:
            tensor.copy_(tensors[0])
        torch_xla.sync()
        assert all(tensor.cpu().equal(expected) for tensor in tensors) and total.isfinite().all()

    def test_an_overwritten_input_without_a_successor_is_given_away(self, x: torch.Tensor) -> None:
        torch_xla.sync()
        assert _XLAC._set_buffer_donation(x, True)
        y = x.sin()
        assert graph_text([], "stablehlo").count("jax.buffer_donor") == 1
        torch_xla.sync()
        torch.testing.assert_close(y.cpu(), torch.linspace(0, 1, 6).reshape(2, 3).sin())
        assert _XLAC._is_placecholder(x)

    def test_an_input_that_a_rule_ignores_stays_an_input(
        self, x: torch.Tensor, rule: Callable[[str, Any], None]
    ) -> None:
        rule("stage.probe.default", lambda ctx, value, a: jax.numpy.ones(value.shape))
        main = next(line for line in stablehlo(torch.ops.stage.probe(x)).splitlines() if "@main(" in line)
        assert main.count("%arg") == 2

    @pytest.mark.parametrize(("form", "start"), [("hlo", "HloModule"), ("stablehlo", "module @"), ("text", "IR {")])
    def test_forms(self, x: torch.Tensor, form: str, start: str) -> None:
        assert graph_text([x.sin()], form).startswith(start)

    def test_bytecode(self, x: torch.Tensor) -> None:
        assert xm.get_stablehlo_bytecode([x.sin()])[:4] == b"ML\xefR"

    def test_an_unknown_form(self, x: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"\[graph\] got form 'onnx', expected text, dot"):
            graph_text([x.sin()], "onnx")


class TestStaticNumbers:
    def test_an_operator_that_needs_its_number_is_recorded_again(
        self, x: torch.Tensor, rule: Callable[[str, Any], None], compiles: Counting
    ) -> None:
        powers: list[float] = []

        def power(ctx: registry.Context, value: Any, a: Any) -> Any:
            powers.append(ctx.constant(a))
            return value ** powers[-1]

        rule("stage.powered.default", power)
        probe = torch.ops.stage.powered
        with compiles(1):
            y = probe(x, 2.5)
            before = _bindings.Cut.of_tensors([y]).preview()
            assert before.packed_numbers()[0].tolist() == [2.5]
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), x.cpu() ** 2.5)
        assert powers == [2.5]
        # From now on the number is part of the key, and no input.
        after = _bindings.Cut.of_tensors([probe(x, 3.5)]).preview()
        assert after.packed_numbers()[0].size == 0
        assert after.key != _bindings.Cut.of_tensors([probe(x, 4.5)]).preview().key
        with compiles(1):
            z = probe(x, 3.5) + probe(x, 4.5) * 1.5
            torch_xla.sync()
        torch.testing.assert_close(z.cpu(), x.cpu() ** 3.5 + x.cpu() ** 4.5 * 1.5)

    def test_showing_a_graph_may_find_it_out_too(self, x: torch.Tensor, rule: Callable[[str, Any], None]) -> None:
        rule("stage.shifted.default", lambda ctx, value, a: value + ctx.constant(a))
        assert "1.234500e+00" in stablehlo(torch.ops.stage.shifted(x, 1.2345))

    @pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.5, float("inf")])
    def test_norms(self, x: torch.Tensor, p: float) -> None:
        y = x.cos()
        torch.testing.assert_close(torch.dist(x, y, p).cpu(), torch.dist(x.cpu(), y.cpu(), p))
        torch.testing.assert_close(torch.cdist(x, y, p).cpu(), torch.cdist(x.cpu(), y.cpu(), p))

    def test_decompositions_get_their_numbers(self, x: torch.Tensor) -> None:
        for value in (0.25, 0.75):
            torch.testing.assert_close(torch.logit(x, value).cpu(), torch.logit(x.cpu(), value))


class TestErrors:
    def test_the_operator_is_named(self, x: torch.Tensor, rule: Callable[[str, Any], None]) -> None:
        def broken(ctx: Any, value: Any, a: Any) -> Any:
            raise KeyError("no such thing")

        rule("stage.probe.default", broken)
        described = cut_of(torch.ops.stage.probe(x).sin())
        unknown = replace(described, nodes=tuple(replace(node, frame=None) for node in described.nodes))
        with pytest.raises(lowering.LoweringError, match=r"\[lower stage.probe.default\] KeyError") as failure:
            lowering.lower(unknown)
        assert "XLA_IR_DEBUG=1 tells the line" in str(failure.value)

    def test_the_users_line_is_named(self, x: torch.Tensor, rule: Callable[[str, Any], None]) -> None:
        def broken(ctx: Any, value: Any, a: Any) -> Any:
            raise KeyError("no such thing")

        rule("stage.probe.default", broken)
        x.add_(torch.ops.stage.probe(x))
        line = here(-1)
        with pytest.raises(RuntimeError, match="recorded at") as failure:
            torch_xla.sync()
        assert f"recorded at {line}" in str(failure.value)

    @pytest.mark.parametrize(
        ("result", "text"),
        [
            (lambda value: value[:1], r"got shape \[1, 3\] of its rule, expected \[2, 3\]"),
            (lambda value: (value, value), "got 2 results of its rule, expected 1"),
            (lambda value: None, r"got no value of its rule, expected torch.float32\[2, 3\]"),
        ],
    )
    def test_a_result_that_breaks_the_promise(
        self,
        x: torch.Tensor,
        rule: Callable[[str, Any], None],
        result: Callable[[Any], Any],
        text: str,
    ) -> None:
        rule("stage.probe.default", lambda ctx, value, a: result(value))
        with pytest.raises(lowering.LoweringError, match=text):
            lowering.lower(cut_of(torch.ops.stage.probe(x)))

    def test_a_result_of_another_dtype_is_cast(self, x: torch.Tensor, rule: Callable[[str, Any], None]) -> None:
        rule("stage.probe.default", lambda ctx, value, a: value.astype("float64") * 2)
        y = torch.ops.stage.probe(x)
        torch_xla.sync()
        assert y.dtype == y.cpu().dtype == torch.float32
        torch.testing.assert_close(y.cpu(), x.cpu() * 2)

    def test_a_failed_graph_says_so_and_gives_old_values_back(
        self, x: torch.Tensor, rule: Callable[[str, Any], None]
    ) -> None:
        def broken(ctx: Any, value: Any, a: Any) -> Any:
            raise KeyError("no such thing")

        rule("stage.probe.default", broken)
        old = x.tolist()
        torch_xla.sync()
        lost = torch.ops.stage.probe(x)
        x.add_(lost)
        with pytest.raises(RuntimeError, match=r"\[sync\] graph .* failed: \[lower stage.probe.default\]"):
            torch_xla.sync()
        assert x.tolist() == old
        with pytest.raises(RuntimeError, match="no value before that graph; make it again"):
            lost.cpu()
        assert (x + 1).tolist() == (torch.tensor(old) + 1).tolist()

    def test_two_rules_for_one_operator(self) -> None:
        with pytest.raises(ValueError, match="aten.add.Tensor has two rules"):
            registry.lowers("aten.add.Tensor")(lambda ctx: None)


def test_lowering_is_timed_once_per_graph(x: torch.Tensor) -> None:
    cache.clear()
    with sampled("LoweringTime", 1), sampled("CompileTime", 1):
        for i in range(3):
            y = x * (i + 2.5)
            torch_xla.sync()
    assert y.shape == x.shape


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_again_afterwards(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, enabled: bool, fails: bool
) -> None:
    seen = []

    def look() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("no")

    cache.clear()
    y = x.sinc() + x.cos()
    try:
        (gc.enable if enabled else gc.disable)()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no") if fails else nullcontext():
            patch.setattr(lowering, "ProgramSignature", lambda *given: look() or ProgramSignature(*given))
            torch_xla.sync()
        assert seen == [False] and gc.isenabled() == enabled
        assert y.shape == x.shape
    finally:
        gc.enable()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.costs("programs of some hundred operators")
def test_a_training_step_is_lowered_for_a_device_that_is_not_there(platform: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(2))
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.memory = nn.LSTM(9, 8, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.layer(self.memory(self.image(x))[0]).mean(1))

    model = Model().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("xla", torch.bfloat16):
        scores = model(torch.ones(2, 1, 8, 8, device="xla"))
    loss = nn.functional.cross_entropy(scores.float(), torch.zeros(2, dtype=torch.int64, device="xla"))
    loss.backward()
    optimizer.step()
    text = lowered([loss, *model.parameters()], "step", platform).stage.as_text()
    assert "stablehlo.convolution" in text and "stablehlo.while" in text and "bf16" in text
    assert "torch_xla.host_kernel" not in text
    assert loss.isfinite().item()  # and what is here can run it too
