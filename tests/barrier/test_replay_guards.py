"""Steps that are replayed: whatever of Python changes between calls, the result is that of a recorded call."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from test_replay import nothing_pending, replays  # noqa: F401
from torch import Tensor, nn

import torch_xla
from torch_xla import _bindings

RATE = 0.5


class Scaled(nn.Module):
    """A layer with what a module can hold."""

    unit = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        nn.init.ones_(self.layer.weight)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0
        self.options = {"bias": 0.0, "terms": [1.0, 2.0]}
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.layer(x)) * self.scale * self.unit + self.offset
        return y + self.options["bias"] + sum(self.options["terms"])


class Settings:
    rate = 1.0


settings = Settings()
factor = 1.0


def helper(x: Tensor) -> Tensor:
    return x * factor * settings.rate


def ones() -> Tensor:
    return torch.ones(1, 3).to("xla")


def replace_data(model: Scaled) -> object:
    kept = model.layer.weight.data
    model.layer.weight.data = torch.full((3, 3), 2.0).to(model.layer.weight.device)
    return kept


def replace_parameter(model: Scaled) -> object:
    kept = model.layer.weight
    model.layer.weight = nn.Parameter(torch.full((3, 3), 3.0).to(kept.device))
    return kept


def assign_state(model: Scaled) -> object:
    kept = dict(model.named_parameters())
    device = model.layer.weight.device
    model.load_state_dict(
        {"layer.weight": torch.full((3, 3), 4.0).to(device), "offset": torch.ones(3).to(device)}, assign=True
    )
    return kept


def replace_layer(model: Scaled) -> object:
    kept = model.layer
    model.layer = copy.deepcopy(kept)
    with torch.no_grad():
        model.layer.weight.mul_(1.5)
    return kept


def patch_class(_: Scaled) -> None:
    Scaled.unit += 7.0


def set_global(_: Scaled) -> None:
    global factor
    factor += 1.5


def set_another(_: Scaled) -> None:
    settings.rate *= 2


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "a parameter's data": replace_data,
    "a parameter": replace_parameter,
    "a state assigned": assign_state,
    "a layer": replace_layer,
    "a forward hook": lambda m: m.layer.register_forward_hook(lambda _m, _i, out: out * 10),
    "a hook before forward": lambda m: m.layer.register_forward_pre_hook(lambda _m, given: (given[0] * 2,)),
    "a number of the module": lambda m: setattr(m, "scale", m.scale + 2.0),
    "a number in its options": lambda m: m.options.update(bias=m.options["bias"] + 1),
    "a number in a list of its options": lambda m: m.options["terms"].append(3.0),
    "the dropout": lambda m: setattr(m.drop, "p", 1.0),
    "training": lambda m: m.train(not m.training),
    "a buffer": lambda m: setattr(m, "offset", torch.full((3,), 5.0).to(m.offset.device)),
    "a forward of its own": lambda m: setattr(m.layer, "forward", lambda x: x * 3),
    "what the class has": patch_class,
    "a global": set_global,
    "a setting of another object": set_another,
    "a value in place": lambda m: m.layer.weight.data.add_(1),
    "nothing": lambda m: None,
}
SHARED = (patch_class, set_global, set_another)


def apply(change: str, *models: Scaled) -> list[object]:
    """Changes all models, or once what they share; gives what they had, which lives on."""
    function = CHANGES[change]
    return [function(model) for model in (models[:1] if function in SHARED else models)]


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "unit", 1.0)
    monkeypatch.setattr(settings, "rate", 1.0)
    monkeypatch.setitem(globals(), "factor", 1.0)


def pair() -> tuple[Scaled, Scaled]:
    model = Scaled()
    return copy.deepcopy(model), model.to("xla")


def evaluating(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return helper(model(x))

    return step


class TestWhatChanges:
    @pytest.mark.parametrize("change", CHANGES)
    def test_each_is_seen(self, change: str) -> None:
        cpu, xla = pair()
        step, before = torch_xla.compile(evaluating(xla), replay=True), replays()
        for _ in range(5):
            step(ones())
        assert replays() - before == 2
        kept = apply(change, xla, cpu)
        expected = evaluating(cpu)(torch.ones(1, 3))
        for _ in range(5):
            torch.testing.assert_close(step(ones()).cpu(), expected)
        assert replays() - before >= 4  # and replayed again
        del kept

    @pytest.mark.parametrize("seed", range(3))
    def test_at_random(self, seed: int) -> None:
        draw = random.Random(seed)
        cpu, xla = pair()
        step, reference = torch_xla.compile(evaluating(xla), replay=True), evaluating(cpu)
        kept: list[object] = []
        for _ in range(12):
            for _ in range(draw.randrange(1, 4)):
                torch.testing.assert_close(step(ones()).cpu(), reference(torch.ones(1, 3)))
            kept += apply(draw.choice(list(CHANGES)), xla, cpu)


class TestNumbers:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x, i: x * min(i, 5),
            lambda x, i: x * max(i, 5),
            lambda x, i: x * (i // 4),
            lambda x, i: x + 1 if i > 5 else x - 1,
            lambda x, i: x * (0.1 * i if i < 6 else 0.05 * i),
            lambda x, i: x * [1, 2, 3, 4, 5, 6, 7, 8, 9, 10][i],
        ],
    )
    def test_that_are_computed_from_arguments(self, function: Callable[[Tensor, int], Tensor]) -> None:
        step, x = torch_xla.compile(function, replay=True), torch.ones(3).to("xla")
        for i in (2, 3, 4, 5, 6, 7, 8, 9, 3, 4):
            torch.testing.assert_close(step(x, i).cpu(), function(torch.ones(3), i))

    def test_equal_ones_are_replayed_and_others_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        step, x = torch_xla.compile(lambda x, i: x * i, replay=True), torch.ones(3).to("xla")
        before = replays()
        for _ in range(4):
            assert step(x, 2)[0].item() == 2
        assert replays() - before == 2 and not capsys.readouterr().err
        found = [step(x, i) for i in (2.0, True, 5, 0.0, -0.0)]
        assert [y.dtype for y in found[:3]] == [torch.float32] * 3 and found[4].signbit().all().item()
        assert "a number among its arguments is another in each call" in capsys.readouterr().err

    def test_a_number_in_a_tensor_is_an_input(self) -> None:
        step = torch_xla.compile(lambda x, rate: x * rate, replay=True)
        x, before = torch.ones(3).to("xla"), replays()
        for i in range(6):
            assert step(x, torch.tensor(0.5 * i)).tolist() == [0.5 * i] * 3
        assert replays() - before == 4

    def test_a_host_argument_that_is_computed_with(self, capsys: pytest.CaptureFixture[str]) -> None:
        step = torch_xla.compile(lambda x, n: x * int(n) + (n * 2).to("xla"), replay=True)
        x = torch.ones(3).to("xla")
        for i in (1, 1, 1, 1, 2, 3):
            assert step(x, torch.tensor(i)).tolist() == [3 * i] * 3
        assert "it computes on the host with an argument" in capsys.readouterr().err

    def test_a_host_tensor_of_a_closure(self) -> None:
        table = torch.arange(3.0)
        step = torch_xla.compile(lambda x: x + table.to("xla"), replay=True)
        before = replays()
        for _ in range(4):
            assert step(ones())[0].tolist() == [1, 2, 3]
        table += 1
        assert step(ones())[0].tolist() == [2, 3, 4] and replays() - before == 2


class TestOptimizers:
    def test_a_parameter_is_frozen(self) -> None:
        w, v = (torch.ones(2).to("xla").requires_grad_() for _ in range(2))
        optimizer = torch.optim.SGD([w, v], 0.5)

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (w * v * x).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for _ in range(5):
            step(torch.zeros(2).to("xla"))
        w.requires_grad_(False)
        step(torch.ones(2).to("xla"))
        assert w.tolist() == [1, 1] and v.tolist() == [0.5, 0.5]

    def test_another_optimizer_while_the_old_one_lives(self) -> None:
        p = torch.ones(2).to("xla").requires_grad_()
        first, second = torch.optim.SGD([p], 0.5), torch.optim.SGD([p], 0.25)
        current = [first]

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> None:
            current[0].zero_grad()
            (p * x).sum().backward()
            current[0].step()

        for _ in range(5):
            step(torch.zeros(2).to("xla"))
        current[0] = second
        step(torch.ones(2).to("xla"))
        assert p.tolist() == [0.75, 0.75]

    @pytest.mark.parametrize("held", [False, True])
    def test_a_state_is_loaded(self, held: bool) -> None:
        q = torch.ones(2).to("xla").requires_grad_()
        optimizer = torch.optim.SGD([q], 1.0, momentum=0.5)

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (q * x).sum().backward()
            optimizer.step()

        for _ in range(5):
            step(torch.ones(2).to("xla"))
        kept = optimizer.state_dict() if held else None
        zero = copy.deepcopy(optimizer.state_dict())
        zero["state"][0]["momentum_buffer"].zero_()
        optimizer.load_state_dict(zero)
        before = q.tolist()
        step(torch.ones(2).to("xla"))
        assert [a - b for a, b in zip(before, q.tolist(), strict=True)] == pytest.approx([1, 1])
        assert optimizer.state[q]["momentum_buffer"].tolist() == [1, 1]
        del kept

    def test_momentum_goes_and_comes_back(self) -> None:
        def run(device: str) -> list[float]:
            r = torch.ones(2).to(device).requires_grad_()
            optimizer = torch.optim.SGD([r], 1.0, momentum=0.9)

            def step(x: Tensor) -> None:
                optimizer.zero_grad()
                (r * x).sum().backward()
                optimizer.step()

            call = torch_xla.compile(step, replay=True) if device == "xla" else step
            for momentum in (0.9, 0.9, 0.9, 0.9, 0.0, 0.9, 0.9):
                optimizer.param_groups[0]["momentum"] = momentum
                call(torch.ones(2).to(device))
            return r.tolist()

        assert run("xla") == pytest.approx(run("cpu"))

    def test_a_hook_of_a_tensor(self) -> None:
        w = torch.ones(2).to("xla").requires_grad_()

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> None:
            w.grad = None
            (w * x).sum().backward()

        x = torch.ones(2).to("xla")
        for _ in range(4):
            step(x)
        w.register_hook(lambda grad: grad * 3)
        step(x)
        assert w.grad is not None and w.grad.tolist() == [3, 3]

    def test_a_rate_that_changes_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        def run(device: str) -> list[float]:
            w = torch.ones(2).to(device).requires_grad_()
            optimizer = torch.optim.SGD([w], 0.5)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

            def step(x: Tensor) -> None:
                optimizer.zero_grad()
                (w * x).sum().backward()
                optimizer.step()

            call = torch_xla.compile(step, replay=True) if device == "xla" else step
            for _ in range(6):
                call(torch.ones(2).to(device))
                scheduler.step()
            return w.tolist()

        assert run("xla") == run("cpu")
        text = capsys.readouterr().err
        assert text.count("step is recorded at each call") == 1
        assert "optimizer.param_groups[0]['lr'] is " in text and "tensor" in text


class TestTheRest:
    def test_the_current_device_and_the_default_dtype(self) -> None:
        step = torch_xla.compile(lambda: torch.ones(3, device="xla") * 2, replay=True)
        before = replays()
        for _ in range(4):
            assert step().dtype == torch.float32
        assert replays() - before == 2
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert step().dtype == torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
        current = torch_xla.device()
        if _bindings.device_count() > 1:
            torch_xla.device(1)
            try:
                assert step().device.index == 1
            finally:
                torch_xla.device(current.index)

    def test_objects_among_the_arguments_are_not_kept(self, capsys: pytest.CaptureFixture[str]) -> None:
        class Batch:
            def __init__(self, x: Tensor) -> None:
                self.x = x

        step, alive = torch_xla.compile(lambda b: b.x * 2, replay=True), []
        for i in range(6):
            batch = Batch(torch.full((2,), float(i)).to("xla"))
            alive.append(weakref.ref(batch.x))
            assert step(batch).tolist() == [2 * i] * 2
        del batch
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        assert "it is given a Batch" in capsys.readouterr().err

    def test_an_old_parameter_is_not_kept(self) -> None:
        model = Scaled().to("xla")
        step = torch_xla.compile(evaluating(model), replay=True)
        for _ in range(4):
            step(ones())
        old = weakref.ref(model.layer.weight)
        model.layer.weight = nn.Parameter(torch.ones(3, 3).to("xla"))
        gc.collect()
        assert old() is None

    def test_a_tensor_of_a_closure_that_is_an_argument_too(self) -> None:
        kept, other = torch.ones(3).to("xla"), torch.zeros(3).to("xla")
        step = torch_xla.compile(lambda x: x.mean() * 0 + kept * 2, replay=True)
        for x in (other, kept, kept, kept, other, other):
            assert step(x).tolist() == [2] * 3
