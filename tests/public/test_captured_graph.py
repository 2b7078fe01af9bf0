"""`torch_xla.Graph`: replays compute what the captured calls would have."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Counting
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_xla
from torch_xla import _bindings, _metrics
from torch_xla.utils import dlpack

Step = Callable[..., Any]
Maker = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=on_device(p)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, capturable=on_device(p)),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, capturable=on_device(p)),
    "Adadelta": lambda p: torch.optim.Adadelta(p, capturable=on_device(p)),
    "Adamax": lambda p: torch.optim.Adamax(p, capturable=on_device(p)),
    "ASGD": lambda p: torch.optim.ASGD(p, capturable=on_device(p)),
    "NAdam": lambda p: torch.optim.NAdam(p, capturable=on_device(p)),
    "RAdam": lambda p: torch.optim.RAdam(p, capturable=on_device(p)),
    "Rprop": lambda p: torch.optim.Rprop(p, capturable=on_device(p)),
}
FEW = ("SGD momentum", "Adam", "AdamW fused")


def on_device(parameters: Sequence[Tensor]) -> bool:
    return parameters[0].device.type == "xla"


def replays() -> int:
    return _metrics.counter("Replay") or 0


def captured(function: Step, *static: Tensor) -> tuple[torch_xla.Graph, Any]:
    graph = torch_xla.Graph()
    with graph:
        made = function(*static)
    return graph, made


@pytest.fixture(autouse=True)
def nothing_is_captured() -> Iterator[None]:
    torch_xla.sync()
    yield
    assert not _bindings.captures_here() and not _bindings.is_captured(0) and not _bindings.is_eager()
    torch_xla.sync()


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes).to("xla")


def network(device: str, *more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), *more, nn.Linear(16, 4))
    return nn.Sequential(*layers).to(device)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(count)]


def train(device: str, make: Maker, accumulate: bool = False, clip: bool = False) -> tuple[list[float], list[Tensor]]:
    """Losses and state of a training loop, whose steps but for the first two are replays on xla."""
    model = network(device)
    average = network(device)
    optimizer = make(list(model.parameters()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if accumulate:
            F.mse_loss(model(x * 0.5), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.2)
        return loss.detach()

    losses = []
    graph: torch_xla.Graph | None = None
    for i, (x, y) in enumerate(batches(6)):
        if i < 2 or device == "cpu":
            losses.append(step(x.to(device), y.to(device)).item())
            continue
        if graph is None:
            static_x, static_y = ones(4, 8), ones(4, 4)
            graph, loss = captured(step, static_x, static_y)
        static_x.copy_(x)
        static_y.copy_(y.to("xla"))
        graph.replay()
        losses.append(loss.item())
    state = [t.cpu() for t in (*model.state_dict().values(), *average.state_dict().values())]
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    kept = [t.cpu() for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim()]
    return losses, state + gradients + kept


class TestTraining:
    @pytest.mark.parametrize("name", FEW)
    def test_as_on_the_cpu(self, name: str) -> None:
        self.check(OPTIMIZERS[name])

    @pytest.mark.sweep
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_each_optimizer(self, name: str) -> None:
        self.check(OPTIMIZERS[name])

    def test_accumulated_and_clipped_gradients(self) -> None:
        self.check(OPTIMIZERS["AdamW fused"], accumulate=True, clip=True)

    @staticmethod
    def check(make: Maker, **options: bool) -> None:
        before = replays()
        losses, state = train("xla", make, **options)
        assert replays() - before == 4
        expected, expected_state = train("cpu", make, **options)
        torch.testing.assert_close(losses, expected, rtol=2e-4, atol=1e-5)
        torch.testing.assert_close(state, expected_state, rtol=2e-4, atol=2e-5)

    def test_a_rate_in_a_tensor_follows_its_schedule(self) -> None:
        def run(device: str) -> list[float]:
            weight = nn.Parameter(torch.ones(3, device=device))
            optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1, device=device), fused=True)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

            def step() -> None:
                optimizer.zero_grad()
                weight.square().sum().backward()
                optimizer.step()

            step()
            graph = captured(step)[0] if device == "xla" else None
            for _ in range(4):
                schedule.step()
                graph.replay() if graph else step()
            return weight.tolist()

        assert run("xla") == pytest.approx(run("cpu"), rel=1e-5)

    def test_gradients_that_are_kept_from_step_to_step(self) -> None:
        weight = nn.Parameter(ones(3))
        x = ones(3)
        (weight * x).sum().backward()
        graph, _ = captured(lambda: (weight * x).sum().backward())
        for i in range(3):
            x.fill_(i)
            graph.replay()
        assert weight.grad is not None and weight.grad.tolist() == [4, 4, 4]

    def test_a_step_is_one_program(self, compiles: Counting) -> None:
        model, x = network("xla"), ones(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        torch_xla.sync()
        with compiles(1):
            graph, loss = captured(step)
            for _ in range(3):
                graph.replay()
        assert loss.item() > 0


class TestMemory:
    def test_nothing_runs_before_a_replay(self) -> None:
        x = ones(3)
        graph, y = captured(lambda: x.add_(1) * 2)
        assert x.tolist() == [1, 1, 1]
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a tensor that was made while a graph was captured"):
            y.tolist()
        with pytest.raises(RuntimeError, match="expected a replay before its value is used"):
            y + 1
        graph.replay()
        assert x.tolist() == [2, 2, 2] and y.tolist() == [4, 4, 4]

    def test_what_is_made_from_nothing_is_made_anew(self) -> None:
        x = ones(3)

        def step() -> Tensor:
            total = torch.zeros(3, device="xla")
            for _ in range(2):
                total += x
            return total

        graph, total = captured(step)
        for i in range(3):
            x.fill_(i)
            graph.replay()
            assert total.tolist() == [2 * i] * 3
            total.add_(1)

    def test_a_fill_alone_is_written_at_each_replay(self) -> None:
        x = ones(3)
        graph, y = captured(lambda: (x.zero_(), torch.full((2,), 7.0, device="xla"))[1])
        for _ in range(2):
            x.fill_(5)
            graph.replay()
            assert x.tolist() == [0, 0, 0] and y.tolist() == [7, 7]
            y.fill_(1)

    def test_host_values_are_constants(self) -> None:
        x, host = ones(3), torch.tensor([1.0, 2.0, 3.0])
        scale = torch.tensor(2.0)

        def step() -> tuple[Tensor, Tensor]:
            x.copy_(host)
            return x * scale, torch.tensor([4, 5], device="xla")

        graph, (y, z) = captured(step)
        host.zero_()
        for _ in range(2):
            x.fill_(9)
            z.zero_()
            graph.replay()
            assert x.tolist() == [1, 2, 3] and y.tolist() == [2, 4, 6] and z.tolist() == [4, 5]

    def test_views_and_aliases(self) -> None:
        x = torch.arange(6.0).to("xla").reshape(2, 3)
        row, flat = x[0], x.view(-1)

        def step() -> tuple[Tensor, Tensor]:
            row.add_(1)
            x.t()[1].mul_(2)
            y = x + 0
            return y[1], flat[2:4]

        graph, (part, both) = captured(step)
        expected = torch.arange(6.0).reshape(2, 3)
        for _ in range(3):
            expected[0] += 1
            expected.t()[1] *= 2
            graph.replay()
            assert x.tolist() == expected.tolist() and row.tolist() == expected[0].tolist()
            assert part.tolist() == expected[1].tolist() and both.tolist() == expected.view(-1)[2:4].tolist()

    def test_copies_within(self) -> None:
        a, b = torch.tensor([1.0, 2.0]).to("xla"), torch.tensor([3.0, 4.0]).to("xla")

        def step() -> Tensor:
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
            return kept

        graph, kept = captured(step)
        graph.replay()
        assert a.tolist() == [3, 4] and b.tolist() == [1, 2] and kept.tolist() == [1, 2]
        graph.replay()
        assert a.tolist() == [1, 2] and b.tolist() == [3, 4] and kept.tolist() == [3, 4]

    def test_what_others_have_of_what_is_overwritten(self) -> None:
        x = ones(3)
        graph, _ = captured(lambda: x.add_(1))
        before, view = x.clone(), x[1:]
        pending = x * 10
        array = dlpack.to_dlpack(x)
        graph.replay()
        later = x.clone()
        graph.replay()
        assert [t.tolist() for t in (x, before, view, pending, later)] == [[3] * 3, [1] * 3, [3] * 2, [10] * 3, [2] * 3]
        assert dlpack.from_dlpack(array).tolist() == [1] * 3

    def test_memory_is_kept(self) -> None:
        held, y = [ones(3)], ones(3)
        graph, _ = captured(lambda: y.add_(held[0]))
        held.clear()
        gc.collect()
        graph.replay()
        assert y.tolist() == [2] * 3

    def test_results_that_nobody_wants_are_freed(self) -> None:
        x = ones(3)
        before = len(_bindings.live_tensors(0))
        graph, y = captured(lambda: x * 2)
        assert len(_bindings.live_tensors(0)) == before
        graph.replay()
        assert len(_bindings.live_tensors(0)) == before + 1 and y.tolist() == [2] * 3
        del y
        graph.replay()
        assert len(_bindings.live_tensors(0)) == before

    def test_a_tensor_that_dies_within(self) -> None:
        held, y = [ones(3) * 3], ones(3)

        def step() -> None:
            y.mul_(held[0])
            held.clear()

        graph, _ = captured(step)
        graph.replay()
        graph.replay()
        assert y.tolist() == [9] * 3

    def test_what_is_pending_runs_first(self) -> None:
        x = ones(512, 512)
        graph, _ = captured(lambda: x.add_(1))
        x.mul_(4)  # operator by operator, in the background
        graph.replay()
        assert x[0, 0] == 5

    def test_several_graphs_on_the_same_memory(self) -> None:
        x = ones(3)
        first, y = captured(lambda: x * 2)
        second, z = captured(lambda: (y + 1, x.add_(1))[0])
        with pytest.raises(RuntimeError, match="expected a replay before its value is used"):
            second.replay()
        for i in range(3):
            first.replay()
            second.replay()
            assert (y.tolist(), z.tolist(), x.tolist()) == ([2 * i + 2] * 3, [2 * i + 3] * 3, [i + 2] * 3)

    def test_a_forward_and_a_backward_graph(self) -> None:
        """The pattern of `torch.cuda.make_graphed_callables`."""
        model, plain = network("xla"), network("cpu")
        static = ones(4, 8).requires_grad_()
        parameters = tuple(model.parameters())
        forward, output = captured(model, static)
        grad = torch.empty_like(output)
        backward, grads = captured(
            lambda: torch.autograd.grad((output,), (static, *parameters), (grad,), allow_unused=True)
        )

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, *_: Tensor) -> Tensor:
                static.data.copy_(x)
                forward.replay()
                return output.detach()

            @staticmethod
            def backward(ctx: Any, given: Tensor) -> tuple[Tensor, ...]:
                grad.copy_(given)
                backward.replay()
                return tuple(g.detach() for g in grads)

        for x, y in batches(3):
            model.zero_grad()
            plain.zero_grad()
            own, other = x.to("xla").requires_grad_(), x.clone().requires_grad_()
            F.mse_loss(Graphed.apply(own, *parameters), y.to("xla")).backward()
            F.mse_loss(plain(other), y).backward()
            torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
        for one, two in zip(parameters, plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), two.grad, rtol=1e-4, atol=1e-5)


class TestRandomNumbers:
    def test_go_on_as_captured_calls_would(self) -> None:
        x = ones(64)

        def draws(replayed: bool) -> list[list[float]]:
            torch.manual_seed(3)
            results = [torch.rand(2, device="xla").tolist()]
            step = lambda: (F.dropout(x), torch.rand(2, device="xla"))  # noqa: E731
            graph, made = captured(step) if replayed else (None, None)
            for _ in range(3):
                if graph is not None:
                    graph.replay()
                else:
                    made = step()
                results += [t.tolist() for t in made]
                results.append(torch.rand(1, device="xla").tolist())
            return results

        assert draws(True) == draws(False)

    def test_a_checkpointed_model_draws_the_same_twice(self) -> None:
        model = network("xla", nn.Dropout())
        x = ones(4, 8)

        def step() -> Tensor:
            model.zero_grad()
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            return loss

        torch.manual_seed(5)
        graph, loss = captured(step)
        graph.replay()
        graph.replay()
        got = loss.item(), [p.grad.cpu() for p in model.parameters()]
        torch.manual_seed(5)
        step()
        expected = step().item(), [p.grad.cpu() for p in model.parameters()]
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda: torch.rand(2, device="xla", generator=torch.Generator("xla")),
            lambda: (torch.manual_seed(7), torch.rand(2, device="xla")),
        ],
    )
    def test_other_states_are_refused(self, draw: Callable[[], Any]) -> None:
        torch.manual_seed(1)
        with pytest.raises(RuntimeError, match=r"^\[graph\] got .* while a graph is captured, expected"):
            captured(draw)


class TestInterface:
    def test_begin_and_end_are_calls_too(self) -> None:
        x = ones(3)
        graph = torch.xla.Graph(pool=(3, 4), capture_error_mode="thread_local")
        assert not torch.xla.is_current_stream_capturing()
        graph.capture_begin()
        assert torch.xla.is_current_stream_capturing()
        x.add_(1)
        graph.capture_end()
        assert not torch.xla.is_current_stream_capturing() and graph.pool() == (3, 4)
        graph.replay()
        assert x.tolist() == [2] * 3

    def test_a_capture_that_is_never_ended(self) -> None:
        x = ones(3)
        graph = torch_xla.Graph()
        graph.capture_begin()
        x.add_(1)
        del graph
        gc.collect()
        assert x.tolist() == [1] * 3

    def test_a_graph_is_captured_once_or_reset(self) -> None:
        x = ones(3)
        graph, _ = captured(lambda: x.add_(1))
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a second capture; make another graph"):
            graph.capture_begin()
        graph.reset()
        with pytest.raises(RuntimeError, match=r"^\[graph\] got replay\(\), expected a capture before it"):
            graph.replay()
        with graph:
            x.mul_(5)
        graph.replay()
        assert x.tolist() == [5] * 3

    def test_a_kept_graph_is_compiled_when_it_is_asked_for(self, compiles: Counting) -> None:
        x = ones(3)
        for asks in (True, False):
            graph = torch_xla.Graph(keep_graph=True)
            torch_xla.sync()
            with compiles(0), graph:
                x.mul_(1.25).cos_() if asks else x.sub_(0.5).cos_()
            with compiles(1):
                if asks:
                    graph.instantiate()
                graph.replay()
        expected = torch.ones(3).mul_(1.25).cos_().sub_(0.5).cos_()
        torch.testing.assert_close(x.cpu(), expected)

    def test_a_dump(self, tmp_path: Path) -> None:
        x = ones(3)
        graph = torch_xla.Graph()
        with pytest.warns(UserWarning, match="enable_debug_mode"):
            graph.debug_dump(str(tmp_path / "none.dot"))
        graph.enable_debug_mode()
        with graph:
            x.mul_(3)
        graph.debug_dump(str(tmp_path / "graph.dot"))
        assert "digraph" in (tmp_path / "graph.dot").read_text() and "mul" in (tmp_path / "graph.dot").read_text()

    def test_nothing_within(self) -> None:
        graph = torch_xla.Graph()
        with pytest.warns(UserWarning, match="nothing was recorded"), graph:
            pass
        graph.replay()

    def test_another_device(self) -> None:
        x = torch.ones(3).to("xla:1")
        with torch.xla.device(1):
            graph, y = captured(lambda: x.add_(1) * 2)
        graph.replay()
        assert x.tolist() == [2] * 3 and y.tolist() == [4] * 3

    def test_eager_mode(self) -> None:
        torch_xla.experimental.eager_mode(True)
        try:
            x = ones(3)
            graph, y = captured(lambda: x.add_(1) * 2)
            graph.replay()
            assert x.tolist() == [2] * 3 and y.tolist() == [4] * 3
        finally:
            torch_xla.experimental.eager_mode(False)

    def test_a_profile_counts_replays(self) -> None:
        x = ones(3)
        graph, _ = captured(lambda: x.add_(1))
        with torch_xla.debug.profile() as profile:
            for _ in range(3):
                graph.replay()
        assert len(profile.report.runs) == 3

    def test_the_old_way_says_the_new_one(self) -> None:
        with pytest.raises(ValueError, match=r"^\[compile\] replay=True, expected .*torch_xla\.Graph\(\).*replay\(\)$"):
            torch_xla.compile(lambda x: x, replay=True)
