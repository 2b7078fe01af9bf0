"""Layers rolled up into loops: one is compiled for all, their weights rest as one array, and nobody can tell."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.debug.metrics as met
from torch_xla import _bindings, debug
from torch_xla._core.execute import export
from torch_xla._core.graph import graph
from torch_xla._core.lower import lowering, rolling

WIDTH, LAYERS = 8, 9


@pytest.fixture(autouse=True)
def rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_xla.sync(wait=True)
    monkeypatch.setenv("XLA_ROLL_LAYERS", "3")


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, self.dropout, self.training)


def blocks(count: int = LAYERS, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(count))).double()


def made(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def losses(model: nn.Module, device: str, steps: int = 4, step: Step = step) -> list[float]:
    model, optimizer = made(copy.deepcopy(model).to(device))
    x = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH).to(device)
    results = []
    for _ in range(steps):
        results.append(step(model, optimizer, x))
        torch_xla.sync()
    return [loss.item() for loss in results]


def assert_as_on_cpu(model: nn.Module, step: Step = step) -> None:
    torch.testing.assert_close(losses(model, "xla", step=step), losses(model, "cpu", step=step), rtol=1e-12, atol=0)


def pending(needed: list[torch.Tensor] | None = None) -> graph.Graph:
    what = _bindings.Cut.of_device(0) if needed is None else _bindings.Cut.of_tensors(needed)
    cut = what.preview()
    return rolling.choose_stacks(cut) or graph.describe(cut)


def loops(found: graph.Graph) -> int:
    return len(re.findall(r"stablehlo\.while", lowering.lower(found, to_run=True).stage.as_text()))


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]]:
    model, optimizer = made(blocks().to("xla"))
    x = torch.ones(3, WIDTH, dtype=torch.float64).to("xla")
    for _ in range(2):
        step(model, optimizer, x)
        torch_xla.sync()
    yield model, optimizer, x
    torch_xla.sync(wait=True)


class TestWhatIsFound:
    def test_a_step_is_two_loops(self, trained: Any) -> None:
        step(*trained)
        result = pending()
        assert [run.count for run in result.layers] == [LAYERS, LAYERS - 1]  # nobody wants the gradient of the input
        assert loops(result) == 2

    def test_a_loop_as_long_as_a_model_of_twice_the_layers(self) -> None:
        lines = []
        for count in (6, 12):
            model, optimizer = made(blocks(count).to("xla"))
            for _ in range(2):
                torch_xla.sync()
                step(model, optimizer, torch.ones(3, WIDTH, dtype=torch.float64).to("xla"))
            result = pending()
            lines.append(lowering.lower(result, to_run=True).stage.as_text().count("\n"))
            torch_xla.sync()
        assert lines[0] == lines[1]

    @pytest.mark.parametrize(("setting", "expected"), [("0", 0), ("1", 2), ("10", 0), ("4", 2)])
    def test_the_setting(self, monkeypatch: pytest.MonkeyPatch, trained: Any, setting: str, expected: int) -> None:
        monkeypatch.setenv("XLA_ROLL_LAYERS", setting)
        step(*trained)
        assert loops(pending()) == expected

    def test_it_is_part_of_the_key(self, monkeypatch: pytest.MonkeyPatch, compiles: Any) -> None:
        model, x = blocks(7).to("xla"), torch.ones(3, WIDTH, dtype=torch.float64).to("xla")
        torch_xla.sync()
        for setting, count in (("3", 1), ("0", 1), ("3", 0), ("0", 0)):
            monkeypatch.setenv("XLA_ROLL_LAYERS", setting)
            with compiles(count), torch.no_grad():
                y = model(x)
                torch_xla.sync()
        del y

    def test_not_on_a_cpu_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XLA_ROLL_LAYERS")
        assert (rolling.least("cpu", False), rolling.least("tpu", False), rolling.least("tpu", True)) == (None, 8, None)

    def test_an_optimizer_alone_is_none(self) -> None:
        model, optimizer = made(blocks().to("xla"))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch_xla.sync()
        optimizer.step()
        assert pending().layers == ()

    def test_it_is_told(self, trained: Any) -> None:
        model, _, x = trained
        with torch.no_grad():
            y = model(x * 2)
        assert f"# a loop: {LAYERS} layers of 5 nodes from %1" in export.graph_text([y], "text")
        with debug.profile() as profile:
            torch_xla.sync()
        assert profile.report.compiles[0].loops == ((LAYERS, 5),)


def what_layers_gave(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = x.new_zeros(())
    for layer in model.children():
        x = layer(x)
        loss = loss + (x**2).mean()
    return loss


def weights_of_its_own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.children()):
        x = layer(x) * (1 + i / 7)
    return (x**2).mean()


def checkpoints(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for layer in model.children():
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    return (x**2).mean()


class TestAsUnrolled:
    def test_a_step(self) -> None:
        assert_as_on_cpu(blocks())

    def test_a_chain(self) -> None:
        layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        assert_as_on_cpu(nn.Sequential(*layers).double())

    def test_another_width_in_the_middle(self) -> None:
        torch.manual_seed(0)
        middle = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH))
        assert_as_on_cpu(nn.Sequential(*blocks(4), middle, *blocks(5)).double())

    def test_another_option_in_the_middle(self) -> None:
        model = blocks()
        model[4].norm.eps = 1e-3
        assert_as_on_cpu(model)

    def test_weights_in_two_layers(self) -> None:
        model = blocks()
        model[6].up = model[1].up
        model[5].down.weight = model[4].down.weight
        assert_as_on_cpu(model)

    def test_a_hook_in_one_layer(self) -> None:
        def with_hook(model: nn.Module, *others: Any) -> torch.Tensor:
            hook = model[3].register_forward_hook(lambda module, args, output: output * 1.5)  # type: ignore[index]
            try:
                return step(model, *others)
            finally:
                hook.remove()

        assert_as_on_cpu(blocks(), with_hook)

    def test_gradients_of_some_layers(self) -> None:
        model = blocks()
        for layer in (0, 1, 5):
            model[layer].requires_grad_(False)
        assert_as_on_cpu(model)

    @pytest.mark.parametrize("loss_of", [what_layers_gave, weights_of_its_own, checkpoints])
    def test_losses(self, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        def own(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        assert_as_on_cpu(blocks(), own)

    def test_accumulated_gradients(self) -> None:
        def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            for part in (x, x * 2):
                loss = (model(part) ** 2).mean()
                loss.backward()
                torch_xla.sync()
            optimizer.step()
            return loss.detach()

        assert_as_on_cpu(blocks(), accumulated)

    @pytest.mark.costs("programs of some hundred operators")
    def test_clipped_and_averaged(self) -> None:
        averages: dict[str, nn.Module] = {}

        def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            average = averages.setdefault(x.device.type, copy.deepcopy(model))
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            return sum((p.detach().sum() for p in average.parameters()), loss.detach())

        assert_as_on_cpu(blocks(), averaged)

    def test_updates_within_the_backward_pass(self) -> None:
        def hooked(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            decayed = {p: p.detach() * 0.9 for p in model.parameters()}

            def update(p: torch.Tensor) -> None:
                p.data.copy_(decayed[p] - p.grad * 0.1)
                p.grad = None

            hooks = [p.register_post_accumulate_grad_hook(update) for p in decayed]
            loss = (model(x) ** 2).mean()
            loss.backward()
            for hook in hooks:
                hook.remove()
            return loss.detach()

        assert_as_on_cpu(blocks(), hooked)

    @pytest.mark.costs("programs of some hundred operators")
    def test_dropout_draws_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        results = []
        for setting in ("3", "0"):
            monkeypatch.setenv("XLA_ROLL_LAYERS", setting)
            torch.manual_seed(1)
            results.append(losses(blocks(dropout=0.3), "xla"))
        torch.testing.assert_close(*results, rtol=1e-12, atol=0)

    def test_a_host_operator_in_each_layer(self) -> None:
        class Sorted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.linear(x)
                return y + torch.histc(y.detach().float(), 4, -1, 1).sum() / 100

        torch.manual_seed(0)
        assert_as_on_cpu(nn.Sequential(*(Sorted() for _ in range(LAYERS))).double())

    def test_caches_that_layers_write(self) -> None:
        def run(device: str) -> list[float]:
            torch.manual_seed(0)
            caches = [torch.zeros(4, WIDTH, dtype=torch.float64).to(device) for _ in range(LAYERS)]
            model = blocks().to(device)
            results = []
            for i in range(4):
                x = torch.full((WIDTH,), i + 1.0, dtype=torch.float64).to(device)
                with torch.no_grad():
                    for cache, layer in zip(caches, model, strict=True):
                        cache.index_copy_(0, torch.tensor([i]).to(device), x[None])
                        x = layer(x) + cache.mean(0)
                torch_xla.sync()
                results.append(x.sum())
            return [value.item() for value in results]

        torch.testing.assert_close(run("xla"), run("cpu"), rtol=1e-12, atol=0)


class TestStacks:
    def test_they_come_back_as_they_went(self, trained: Any, counted: Any) -> None:
        step(*trained)
        result = pending()
        assert result.stacks == len(result.packs) == 4 * 6  # weights, two moments and gradients, of six parameters
        for metric in ("HeldBufferCopies", "UncachedCompile"):
            with counted(metric, 0):
                step(*trained)
                torch_xla.sync(wait=True)

    def test_an_evaluation_takes_them_as_they_rest(self, trained: Any) -> None:
        model, _, x = trained
        expected = copy.deepcopy(model).cpu()(x.cpu())
        with torch.no_grad():
            y = model(x)
            result = pending([y])
        assert result.stacks == 6 and all(len(leaves) == LAYERS and not outputs for leaves, outputs in result.packs)
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-12, atol=0)
        assert all(_bindings.location_of(p)[1] >= 0 for p in model.parameters())

    def test_one_is_read_alone(self, trained: Any) -> None:
        model, *_ = trained
        before = (met.metric_data("InboundData") or (0, 0))[1]
        values = model[4].up.weight.cpu()
        assert values.shape == (2 * WIDTH, WIDTH) and _bindings.location_of(model[4].up.weight)[1] >= 0
        assert met.metric_data("InboundData")[1] > before
        torch.testing.assert_close(model.state_dict()["4.up.weight"].cpu(), values)

    def test_one_is_used_alone(self, trained: Any) -> None:
        model, *_ = trained
        expected = model[4].up.weight.detach().cpu() * 3
        torch.testing.assert_close((model[4].up.weight.detach() * 3).cpu(), expected)
        step(*trained)
        torch_xla.sync()

    def test_an_inference_makes_them_once(self) -> None:
        model = blocks().to("xla")
        x = torch.ones(3, WIDTH, dtype=torch.float64).to("xla")
        expected = copy.deepcopy(model).cpu()(x.cpu())
        for _ in range(2):
            with torch.no_grad():
                y = model(x)
            torch.testing.assert_close(y.cpu(), expected, rtol=1e-12, atol=0)
            places = [_bindings.location_of(layer.up.weight) for layer in model]
            assert len({id(buffer) for buffer, _ in places}) == 1
            assert [start for _, start in places] == [i * 2 * WIDTH * WIDTH for i in range(LAYERS)]

    def test_one_that_is_replaced_meanwhile(self, trained: Any) -> None:
        model, optimizer, x = trained
        with torch.no_grad():
            model[2].up.weight.fill_(0.25)
            model[3].up.weight.data = torch.full_like(model[3].up.weight, 0.5)
        torch_xla.sync()
        expected = (copy.deepcopy(model).cpu()(x.cpu()) ** 2).mean()
        torch.testing.assert_close(step(model, optimizer, x).cpu(), expected.detach(), rtol=1e-12, atol=0)

    def test_copied_and_loaded(self, trained: Any, tmp_path: Any) -> None:
        model, optimizer, x = trained
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
        other, own = made(blocks().to("xla"))
        for to, state in zip((other, own), torch.load(tmp_path / "state.pt"), strict=True):
            to.load_state_dict(state)
        for _ in range(2):
            one, two = step(model, optimizer, x), step(other, own, x)
            torch_xla.sync()
            torch.testing.assert_close(one.cpu(), two.cpu(), rtol=1e-12, atol=0)

    def test_an_optimizer_in_a_graph_of_its_own(self, compiles: Any) -> None:
        model, optimizer = made(blocks().to("xla"))
        x = torch.ones(3, WIDTH, dtype=torch.float64).to("xla")

        def apart() -> None:
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            torch_xla.sync()
            optimizer.step()
            torch_xla.sync()

        apart()
        with compiles(0):
            apart()
        places = {id(_bindings.location_of(layer.up.weight)[0]) for layer in model}
        assert len(places) == 1

    def test_a_failed_step_gives_the_values_back(self, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch_xla._core.compile import compiler

        model, _, x = trained
        before = [p.detach().cpu() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        y = model(x).sum()

        with monkeypatch.context() as patch:
            patch.setattr(compiler, "compile_lowered", Mock(side_effect=RuntimeError("out of luck")))
            with pytest.raises(RuntimeError, match="out of luck"):
                torch_xla.sync()
        del y
        for p, value in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.detach().cpu(), value)


def test_barriers_in_a_loop_of_a_few_bytes() -> None:
    """XLA:CPU makes such a loop one function, for which it has no barriers; the second attempt makes it none."""
    x = torch.zeros(3, 3).to("xla")
    for _ in range(5):
        x = x + 1
        x[1] -= 1
    torch.testing.assert_close(x.cpu(), torch.tensor([[5.0] * 3, [0.0] * 3, [5.0] * 3]))


def test_modules_are_named_by_what_is_common(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [graph.Node("aten.neg.default", (), (), (), False, None, (1, 1), f"Model/h/{i}/attn") for i in range(3)]
    nodes += [graph.Node("aten.neg.default", (), (), (), False, None, (1, 1), None) for _ in range(3)]
    assert rolling.common(nodes[:3]).scope == "Model/h/*/attn"
    assert rolling.common(nodes[3:]).scope is None


def test_what_is_elementwise_of_what_was_saved_is_not_saved() -> None:
    """Of `x`, `x * 3`, its tanh and `1 - tanh²` a backward pass is given the first, for all layers at once."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH).to("xla").requires_grad_() for _ in range(LAYERS)]
    x = torch.ones(64, WIDTH).to("xla")
    for weight in weights:
        x = torch.tanh((x @ weight) * 3).exp().sigmoid()
    x.sum().backward()
    result = pending()
    assert len(result.layers) == 2
    text = lowering.lower(result, to_run=True).stage.as_text()
    # Written once per layer: the product, and nothing else of that size but what is carried into each layer.
    assert len(set(re.findall(rf"%iterArg\w* = %\S+ : tensor<{LAYERS}x64x{WIDTH}xf32>", text))) <= 2
    assert text.count(f"tensor<{LAYERS}x64x{WIDTH}xf32>") > 0


def test_loops_count_in_32_bits_and_stacks_keep_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """TPUs have no longer counters, and to flatten an array is a copy there."""
    texts: list[str] = []

    def lower(*args: Any, **options: Any) -> Any:
        lowered = lower_as_ever(*args, **options)
        texts.append(lowered.stage.as_text())
        return lowered

    lower_as_ever = lowering.lower
    monkeypatch.setattr(lowering, "lower", lower)
    count = 13  # of no other test, whose program would be known
    losses(blocks(count), "xla")
    loops = re.findall(r"stablehlo.while\(.*?\) : (.*)", "\n".join(texts))
    assert loops and not [types for types in loops if types.startswith("tensor<i64>")]
    assert f"tensor<{count}x{2 * WIDTH}x{WIDTH}xf64>" in texts[-1]
    assert f"tensor<{count * 2 * WIDTH * WIDTH}xf64>" not in texts[-1]
