"""Steps that are replayed: what they compute is what recorded calls compute, and what cannot be replayed says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_xla
from torch_xla import _bindings, _metrics
from torch_xla._errors import GraphLimitError

Counting = Callable[..., AbstractContextManager[Any]]
Maker = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01).to(p[0].device), capturable=p[0].device.type == "xla"
    ),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
}
COUNTING = ("Adagrad", "Adadelta")  # on the host
FEW = ("SGD momentum", "AdamW fused")


def replays() -> int:
    return _metrics.counter("Replay") or 0


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_xla.sync()
    yield
    torch_xla.sync()
    assert torch_xla._core.region.current() is None


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    return nn.Sequential(*layers).to(device)


def batches(device: str, count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 8).to(device), torch.randn(size, 4).to(device)) for _ in range(count)]


def train(
    device: str, make: Maker, steps: int = 20, scheduler: Callable[[Any], Any] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    model = network(device)
    optimizer = make(list(model.parameters()))
    schedule = scheduler(optimizer) if scheduler else None

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if device == "xla":
        step = torch_xla.compile(step, replay=True)
    losses = []
    for x, y in batches(device, steps):
        losses.append(step(x, y))
        if schedule is not None:
            schedule.step()
    return [loss.item() for loss in losses], {k: v.cpu() for k, v in model.state_dict().items()}


def check_training(make: Maker, scheduler: Callable[[Any], Any] | None = None, steps: int = 20) -> int:
    before = replays()
    losses, state = train("xla", make, steps, scheduler)
    count = replays() - before
    expected, expected_state = train("cpu", make, steps, scheduler)
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=1e-5)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-5)
    return count


class TestOptimizers:
    @pytest.mark.parametrize("name", FEW)
    def test_train_as_on_the_cpu(self, name: str) -> None:
        assert check_training(OPTIMIZERS[name]) == 17

    @pytest.mark.sweep
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_each_trains_as_on_the_cpu(self, name: str) -> None:
        assert check_training(OPTIMIZERS[name]) == (0 if name in COUNTING else 17)

    def test_a_scheduler_of_a_rate_in_a_tensor(self) -> None:
        rate = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)  # noqa: E731
        assert check_training(OPTIMIZERS["AdamW tensor"], rate) == 17

    def test_what_ran_before_makes_no_difference(self) -> None:
        """The same program with other settings is known already, and some of its numbers have varied."""
        for rate, decay in ((0.1, 0.01), (0.02, 0.3)):
            check_training(lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=decay, fused=True), steps=5)  # noqa: B023
        assert check_training(lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.1, fused=True)) == 17

    def test_a_rate_that_is_set_later(self) -> None:

        def run(device: str) -> tuple[list[float], int]:
            weight = nn.Parameter(torch.ones(3).to(device))
            optimizer = torch.optim.SGD([weight], lr=0.5)

            def step(x: Tensor) -> None:
                optimizer.zero_grad()
                (weight * x).sum().backward()
                optimizer.step()

            if device == "xla":
                step = torch_xla.compile(step, replay=True)
            x, before = torch.arange(3.0).to(device), replays()
            for i in range(12):
                optimizer.param_groups[0]["lr"] = 0.5 if i < 6 else 0.25 / i
                step(x)
            return weight.tolist(), replays() - before

        (found, count), (expected, _) = run("xla"), run("cpu")
        assert found == pytest.approx(expected) and count == 3

    def test_a_rate_that_equals_another_number_by_accident(self) -> None:
        weight = nn.Parameter(torch.ones(3).to("xla"))

        @torch_xla.compile(replay=True)
        def step(x: Tensor, rate: float) -> None:
            weight.data.sub_(x * rate)
            weight.data.mul_(0.5)

        x, expected = torch.ones(3).to("xla"), 1.0
        for rate in (0.5, 0.5, 0.5, 0.5, 0.25, 0.125, 0.75):
            step(x, rate)
            expected = (expected - rate) * 0.5
        assert weight.tolist() == pytest.approx([expected] * 3)

    def test_one_that_reads_is_refused_at_its_line(self) -> None:
        weight = nn.Parameter(torch.ones(3).to("xla"))
        optimizer = torch.optim.LBFGS([weight], max_iter=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        step = torch_xla.compile(lambda: optimizer.step(closure), replay=True)
        step()
        with pytest.raises(GraphLimitError, match=r"^\[replay\] <lambda> reads a value.* at .*test_replay.py"):
            step()


class TestBinding:
    def test_nothing_is_recorded_or_cut(self, compiles: Counting) -> None:
        model = network("xla")
        step = torch_xla.compile(lambda x: model(x).detach(), replay=True)
        data = batches("xla", 6)
        for x, _ in data[:3]:
            step(x)
        calls, graphs = _bindings.op_counts(), _bindings.metric("TensorsGraphSize")
        with compiles(0):
            for x, _ in data[3:]:
                step(x)
        assert _bindings.op_counts() == calls and _bindings.metric("TensorsGraphSize") == graphs

    def test_other_shapes_dtypes_and_modes_record_anew(self) -> None:
        step = torch_xla.compile(lambda x, flag=True: x * 2 if flag else x + 1, replay=True)
        for size in (3, 5, 3, 5, 3, 5, 3, 5):
            assert step(torch.ones(size).to("xla")).tolist() == [2] * size
        for dtype in (torch.int64, torch.bfloat16):
            for _ in range(4):
                assert step(torch.ones(3, dtype=dtype).to("xla")).dtype == dtype
        for _ in range(4):
            assert step(torch.ones(3).to("xla"), flag=False).tolist() == [2, 2, 2]

    def test_results_are_new_tensors(self) -> None:
        step = torch_xla.compile(lambda x: {"sum": x.sum(), "parts": (x + 1, x[1:] * 2, x), "n": 3}, replay=True)
        xs = [torch.full((3,), float(i)).to("xla") for i in range(6)]
        before = replays()
        found = [step(x) for x in xs]
        assert replays() - before >= 3
        for i, (x, result) in enumerate(zip(xs, found, strict=True)):
            assert result["sum"].item() == 3 * i and result["n"] == 3
            assert result["parts"][0].tolist() == [i + 1] * 3 and result["parts"][1].tolist() == [2 * i] * 2
            assert result["parts"][2] is x

    def test_views_of_results_and_of_what_lives_on(self) -> None:
        state = torch.zeros(2, 3).to("xla")

        def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            state.add_(x)
            y = x * 2
            return y.t(), y, state[1]

        step, before = torch_xla.compile(run, replay=True), replays()
        for i in range(6):
            turned, y, row = step(torch.arange(6.0).reshape(2, 3).to("xla"))
            assert turned.shape == (3, 2) and turned.cpu().equal(y.t().cpu())
            assert row.tolist() == [3.0 * (i + 1), 4.0 * (i + 1), 5.0 * (i + 1)]
        assert replays() - before >= 3
        turned += 1
        assert y[0, 1].item() == 3

    def test_arguments_that_are_written(self) -> None:
        step = torch_xla.compile(lambda x: x.add_(1), replay=True)
        x, before = torch.zeros(3).to("xla"), replays()
        for i in range(6):
            version = x._version
            assert step(x) is x
            assert x._version == version + 1
            assert x.tolist() == [i + 1] * 3
        y = torch.zeros(3).to("xla")
        kept = y.clone()
        for _ in range(3):
            step(y)
        assert (y[0].item(), kept[0].item(), x[0].item()) == (3, 0, 6)
        assert replays() - before >= 5

    def test_random_numbers_go_on(self) -> None:
        def numbers(wrap: bool) -> list[list[float]]:
            torch.manual_seed(7)
            step: Any = lambda x: F.dropout(x, 0.5) + torch.rand_like(x)  # noqa: E731
            step = torch_xla.compile(step, replay=wrap) if wrap else step
            x = torch.ones(8).to("xla")
            found = []
            for _ in range(7):
                found.append(step(x))
                torch_xla.sync()
                found.append(torch.rand(2, device="xla"))
            return [f.tolist() for f in found]

        before = replays()
        assert numbers(True) == numbers(False)
        assert replays() - before >= 4

    def test_gradients_gather_in_one_step_and_are_used_in_another(self) -> None:
        def run(device: str) -> list[float]:
            model = network(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def gather(x: Tensor, y: Tensor) -> Tensor:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss.detach()

            def update() -> None:
                optimizer.step()
                optimizer.zero_grad()

            if device == "xla":
                gather, update = torch_xla.compile(gather, replay=True), torch_xla.compile(update, replay=True)
            losses = []
            for i, (x, y) in enumerate(batches(device, 24)):
                losses.append(gather(x, y))
                if i % 3 == 2:
                    update()
                    assert all(p.grad is None for p in model.parameters())
                else:
                    assert all(p.grad is not None for p in model.parameters())
            return [loss.item() for loss in losses]

        before = replays()
        assert run("xla") == pytest.approx(run("cpu"), rel=1e-4)
        assert replays() - before >= 12

    def test_pending_values_are_computed_first(self) -> None:
        weight = torch.ones(3).to("xla")
        step = torch_xla.compile(lambda x: (weight * x).sum(), replay=True)
        for i in range(6):
            weight.add_(1)
            assert step(torch.ones(3).to("xla") * i).item() == 3 * i * (i + 2)

    def test_state_that_is_made_anew_in_each_call(self) -> None:
        class Counter:
            value = torch.zeros(2).to("xla")

        counter = Counter()

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> None:
            counter.value = counter.value * 0.5 + x

        expected, before = 0.0, replays()
        for i in range(8):
            step(torch.full((2,), float(i)).to("xla"))
            expected = expected * 0.5 + i
            assert counter.value.tolist() == [expected] * 2
        assert replays() - before >= 4

    def test_host_tensors_among_the_arguments(self) -> None:
        step, before = torch_xla.compile(lambda x: x.to("xla") * 2, replay=True), replays()
        for i in range(6):
            assert step(torch.full((3,), float(i))).tolist() == [2 * i] * 3
        assert replays() - before >= 3

    def test_views_among_the_arguments(self) -> None:
        step, before = torch_xla.compile(lambda x: x * 2, replay=True), replays()
        whole = torch.arange(12.0).reshape(6, 2).to("xla")
        for i in range(12):
            assert step(whole[i % 6]).tolist() == [4.0 * (i % 6), 4.0 * (i % 6) + 2]
        assert replays() - before >= 6
        rows = torch_xla.compile(lambda x: x.add_(1), replay=True)
        for i in range(6):
            rows(whole[i])
        assert whole.sum().item() == 66 + 12

    def test_one_view_is_the_same_in_each_call(self) -> None:
        weight = torch.arange(6.0).reshape(2, 3).to("xla")
        step, before = torch_xla.compile(lambda w, x: w @ x, replay=True), replays()
        for i in range(6):
            x = torch.full((2,), float(i)).to("xla")
            torch.testing.assert_close(step(weight.t(), x).cpu(), weight.cpu().t() @ x.cpu())
        assert replays() - before >= 3


class TestWithOthers:
    def test_a_scaler_and_autocast(self) -> None:
        from torch_xla.amp import GradScaler, syncfree

        def run(replay: bool) -> tuple[list[float], float]:
            model = network("xla")
            optimizer = syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scaler = GradScaler(init_scale=2.0**10, growth_interval=3)

            def step(x: Tensor, y: Tensor) -> Tensor:
                optimizer.zero_grad()
                with torch.autocast("xla", torch.bfloat16):
                    loss = F.mse_loss(model(x).float(), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                return loss.detach()

            call = torch_xla.compile(step, replay=replay)
            found = []
            for i, (x, y) in enumerate(batches("xla", 9)):
                found.append(call(x * float("inf") if i == 6 else x, y))
            return [x.item() for x in found[:6]], scaler.get_scale()

        before = replays()
        assert run(True) == run(False)
        assert replays() - before == 6

    def test_a_loader(self) -> None:
        import torch_xla.distributed.parallel_loader as pl

        model = network("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch_xla.compile(replay=True)
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        before = replays()
        found = [step(x, y) for x, y in pl.MpDeviceLoader(batches("cpu", 10), torch.device("xla:0"))]
        assert [loss.item() for loss in found] == pytest.approx(train("cpu", OPTIMIZERS["SGD"], 10)[0], rel=1e-4)
        assert replays() - before >= 5

    def test_checkpointed_layers_draw_the_same_numbers_again(self) -> None:
        from torch.utils.checkpoint import checkpoint

        def run(replay: bool) -> list[float]:
            torch.manual_seed(3)
            layer = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).to("xla")
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

            def step(x: Tensor, y: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(checkpoint(layer, x, use_reentrant=False), y)
                loss.backward()
                optimizer.step()
                return loss.detach()

            call = torch_xla.compile(step, replay=replay)
            return [call(x, y).item() for x, y in batches("xla", 7)]

        before = replays()
        assert run(True) == run(False)
        assert replays() - before == 4

    def test_a_profile_counts_replays(self) -> None:
        step = torch_xla.compile(lambda x: x * 3, replay=True)
        x = torch.ones(3).to("xla")
        for _ in range(3):
            step(x)
        with torch_xla.debug.profile() as profile:
            for _ in range(4):
                step(x)
        assert len(profile.report.runs) == 4


class TestGuards:
    def test_train_and_eval(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)).to("xla")
        step = torch_xla.compile(lambda x: model(x).detach(), replay=True)
        x = torch.ones(2, 4).to("xla")
        for _ in range(5):
            step(x)
        model.eval()
        torch.testing.assert_close(step(x).cpu(), model(x).detach().cpu())
        torch.testing.assert_close(step(x).cpu(), step(x).cpu())

    def test_autocast_and_gradients(self) -> None:
        layer = nn.Linear(4, 4).to("xla")
        step = torch_xla.compile(lambda x: layer(x), replay=True)
        x = torch.ones(2, 4).to("xla")
        with torch.no_grad():
            for _ in range(5):
                assert step(x).dtype == torch.float32
            with torch.autocast("xla", torch.bfloat16):
                assert step(x).dtype == torch.bfloat16
        assert step(x).requires_grad

    def test_arguments_that_share_memory(self) -> None:
        step = torch_xla.compile(lambda a, b: a.add_(b).add_(b), replay=True)
        for _ in range(4):
            a, b = torch.ones(3).to("xla"), torch.ones(3).to("xla")
            assert step(a, b).tolist() == [3] * 3
        c = torch.ones(3).to("xla")
        assert step(c, c).tolist() == [4] * 3

    def test_a_closure_s_tensor_that_was_passed_too(self) -> None:
        kept = torch.ones(3).to("xla")
        step = torch_xla.compile(lambda x: x.mean() * 0 + kept * 2, replay=True)
        for _ in range(4):
            assert step(kept).tolist() == [2] * 3
        assert step(torch.zeros(3).to("xla")).tolist() == [2] * 3
        assert step(torch.zeros(3).to("xla")).tolist() == [2] * 3

    def test_a_weight_that_was_copied_keeps_its_value(self) -> None:
        weight = torch.zeros(30_000).to("xla")

        @torch_xla.compile(replay=True)
        def add(x: Tensor) -> None:
            weight.add_(x)

        copies = []
        for _ in range(6):
            add(torch.ones(30_000).to("xla"))
            copies.append(weight.clone())
            torch_xla.sync()
        assert [c[0].item() for c in copies] == [1, 2, 3, 4, 5, 6]

    def test_loading_a_state_in_between(self) -> None:
        model = network("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch_xla.compile(replay=True)
        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        start = {name: value.clone() for name, value in model.state_dict().items()}
        (x, y), *_ = batches("xla", 1)
        first = [step(x, y).item() for _ in range(5)]
        model.load_state_dict(start)
        assert [step(x, y).item() for _ in range(5)] == pytest.approx(first, rel=1e-6)
