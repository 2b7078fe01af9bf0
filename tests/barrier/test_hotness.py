"""Graphs run operator by operator until they repeat: what is counted, and that values are PyTorch's either way."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Counting

import torch_xla
from torch_xla._core.compile import cache
from torch_xla._core.execute import hotness
from torch_xla.debug import no_new_graphs

pytestmark = [pytest.mark.by_default("new graphs are not compiled"), pytest.mark.usefixtures("when_hot")]


def step(rows: int, device: str = "xla") -> torch.Tensor:
    x = torch.arange(float(rows * 300)).view(rows, 300).to(device) / 100
    y = (x.sin() @ x.cos().t()).softmax(-1)
    if device == "xla":
        torch_xla.sync()
    return y.cpu()


class TestCounts:
    def test_a_graph_that_repeats_is_compiled_in_its_second_run(self, compiles: Counting, counted: Counting) -> None:
        with compiles(0), counted("UncompiledRun", 1):
            step(3)
        with compiles(1), counted("UncompiledRun", 0):
            step(3)
        with compiles(0), counted("CachedCompile", 1):
            step(3)

    def test_graphs_that_keep_changing_are_not_compiled(self, compiles: Counting, counted: Counting) -> None:
        with compiles(0), counted("UncompiledRun", 12):
            for rows in range(2, 14):
                torch.testing.assert_close(step(rows), step(rows, "cpu"), rtol=0, atol=0)

    def test_two_in_turns_are_compiled_in_their_third_runs(self, compiles: Counting) -> None:
        with compiles(0):
            for rows in (2, 3, 2, 3):
                step(rows)
        with compiles(2):
            for rows in (2, 3):
                step(rows)

    def test_a_rare_graph_has_to_run_more_often(self, compiles: Counting) -> None:
        """As a prompt's does, which runs once where the graph of a token runs a hundred times."""

        def run(rows: int) -> None:
            x = torch.ones(rows, 300).to("xla")
            for _ in range(40):
                x = x.sin() + 1
            torch_xla.sync()

        for _ in range(8):
            run(3)
        for times, programs in ((8, 0), (25, 1)):
            with compiles(programs):
                for rows in (2, *20 * (3,)) * times:
                    run(rows)

    def test_many_small_operators_have_to_run_more_often(self, compiles: Counting) -> None:
        """By the square of their number: a program of them takes long to compile, and saves little."""

        def total(x: torch.Tensor) -> float:
            result = torch.zeros((), device="xla")
            for i in range(99):
                result = result + x[i + 1 :].sum() * 0.5  # four operators
            return result.item()

        x = torch.arange(100.0).to("xla")
        with compiles(0):
            for _ in range(30):
                value = total(x)
        assert value == sum(0.5 * sum(range(i + 1, 100)) for i in range(99))
        with compiles(1):
            for _ in range(8):
                total(x)

    @pytest.mark.parametrize(("gates", "programs"), [(0, 0), (60, 1)])
    def test_what_is_mostly_convolutions_is_not_compiled(
        self, gates: int, programs: int, compiles: Counting, counted: Counting
    ) -> None:
        """A program would call the same kernels; fusing what is between them is worth one."""
        x, weight = torch.rand(2, 32, 24, 24).to("xla"), torch.rand(32, 32, 3, 3).to("xla") / 300
        with compiles(programs), counted("UncompiledRun", 3 if programs else 6):
            for _ in range(6):
                y = torch.conv2d(x, weight, padding=1)
                for _ in range(gates):
                    y = y * y.sigmoid() + x
                torch_xla.sync()

    def test_convolutions_are_compiled_where_a_program_is_asked_for(self, compiles: Counting) -> None:
        x, net = torch.rand(2, 32, 24, 24).to("xla"), torch.nn.Conv2d(32, 32, 3, padding=1).to("xla")
        whole = torch.compile(net, backend="openxla")
        with torch.no_grad(), compiles(1):
            for _ in range(6):
                whole(x).cpu()

    def test_three_runs_in_a_row_are_enough(self, compiles: Counting) -> None:
        with compiles(0):
            for rows in (*range(2, 12), 20, 20, 20):
                step(rows)
        with compiles(1):
            step(20)

    def test_a_region_is_compiled_at_once(self, compiles: Counting) -> None:
        @torch_xla.compile
        def region(x: torch.Tensor) -> torch.Tensor:
            return x.sin().sum()

        with compiles(1):
            region(torch.ones(400, 100).to("xla"))

    @pytest.mark.usefixtures("all_told")
    def test_the_third_graph_of_a_line_tells(self, capfd: pytest.CaptureFixture[str]) -> None:
        for rows in range(2, 8):
            step(rows)
        (told,) = [line for line in capfd.readouterr().err.splitlines() if "keep changing" in line]
        assert "float32[3, 300] to float32[4, 300]" in told and "operator by operator" in told

    def test_no_new_graphs_speaks_of_graphs_not_of_programs(self, compiles: Counting) -> None:
        step(3)
        with no_new_graphs(), compiles(1):
            step(3)
        with no_new_graphs(), pytest.raises(RuntimeError, match="new"):
            step(5)
        torch_xla.sync()


class TestValues:
    def test_training_is_bit_for_bit_the_cpus(self, compiles: Counting) -> None:
        def train(device: str) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Conv2d(1, 4, 3),
                torch.nn.BatchNorm2d(4),
                torch.nn.ReLU(),
                torch.nn.Flatten(),
                torch.nn.Linear(144, 5),
            ).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            losses = []
            for i in range(6):
                x = torch.linspace(-1, 1, (i + 2) * 64).view(-1, 1, 8, 8).to(device)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), torch.arange(i + 2).remainder(5).to(device))
                loss.backward()
                optimizer.step()
                if device == "xla":
                    torch_xla.sync()
                losses.append(loss.detach().cpu())
            return [*losses, *(p.detach().cpu() for p in model.parameters())]

        with compiles(0):
            result = train("xla")
        torch.testing.assert_close(result, train("cpu"), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize(
        "draw",
        [
            lambda x: torch.nn.functional.dropout(x, 0.3),
            lambda x: torch.rand_like(x),
            lambda x: torch.bernoulli(x, 0.4),
            lambda x: torch.randn_like(x),
            lambda x: torch.native_dropout(x, 0.3, True)[0],
        ],
    )
    def test_draws_are_those_of_the_program(
        self, draw: Callable[[torch.Tensor], torch.Tensor], compiles: Counting
    ) -> None:
        def drawn() -> torch.Tensor:
            torch_xla.manual_seed(7)
            y = draw(torch.ones(33, 700).to("xla"))
            torch_xla.sync()
            return y.cpu()

        with compiles(0):
            first = drawn()
        with compiles(1):
            torch.testing.assert_close(drawn(), first, rtol=0, atol=0)

    def test_attention_forward_and_backward(self, compiles: Counting) -> None:
        def run(device: str) -> list[torch.Tensor]:
            torch.manual_seed(1)
            q, k, v = (torch.randn(2, h, 5, 8).to(device).requires_grad_() for h in (4, 2, 2))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out.sum().backward()
            if device == "xla":
                torch_xla.sync()
            return [out.detach().cpu(), *(t.grad.cpu() for t in (q, k, v) if t.grad is not None)]

        with compiles(0):
            result = run("xla")
        torch.testing.assert_close(result, run("cpu"))

    def test_views_writes_and_programs_in_between(self, compiles: Counting) -> None:
        """Random programs of changing shapes; every third graph repeats, so values go from one kind to the other."""

        def run(device: str, seed: int) -> list[torch.Tensor]:
            draw = random.Random(seed)
            torch.manual_seed(seed)
            state = torch.randn(6, 40).to(device)
            kept = []
            for i in range(12):
                n = 3 + i % 3
                y = state[:n].t().reshape(n, 40)
                way = draw.randrange(5)
                if way == 0:
                    state[1:n] = y[1:] * 0.5
                elif way == 1:
                    state.t()[:, 0].add_(y.sum())
                elif way == 2:
                    state = torch.cat([state[n:], y.flip(0)])
                elif way == 3:
                    state[:, ::2] -= state[:, 1::2].tanh()
                else:
                    state = torch.where(state > 0, state, y.mean() + state.as_strided((6, 40), (40, 1)))
                if device == "xla" and draw.randrange(2):
                    torch_xla.sync()
                elif device == "cpu":
                    draw.randrange(2)
                kept.append(state[draw.randrange(6)].clone())
            return [t.cpu() for t in kept]

        for seed in range(12):
            ours, cpus = run("xla", seed), run("cpu", seed)
            torch.testing.assert_close(ours, cpus)

    def test_two_runs_are_bit_for_bit_the_same(self) -> None:
        def run() -> list[torch.Tensor]:
            cache.clear()
            hotness.clear()
            torch_xla.manual_seed(3)
            return [
                step(2 + i % 4) + torch.nn.functional.dropout(torch.ones(2 + i % 4).to("xla")).cpu() for i in range(16)
            ]

        torch.testing.assert_close(run(), run(), rtol=0, atol=0)

    def test_what_a_program_writes_over_is_nobody_elses(self) -> None:
        """The first program takes what kernels made, without a copy, and may write over its inputs."""
        x = torch.ones(64, 64).to("xla")
        kept = []
        for i in range(6):
            x.mul_(1.5).add_(i)
            torch_xla.sync()
            kept.append(x.clone())
        expected = torch.ones(64, 64)
        for i, actual in enumerate(kept):
            expected = expected * 1.5 + i
            torch.testing.assert_close(actual.cpu(), expected)


class TestBadInput:
    def test_an_index_that_is_refused_gives_what_a_program_gives(self, compiles: Counting) -> None:
        def run() -> torch.Tensor:
            y = torch.arange(900.0).to("xla")[torch.tensor([1, 5000]).to("xla")] * torch.ones(50, 1).to("xla")
            torch_xla.sync()
            return y.cpu()

        with compiles(0):
            first = run()
        with compiles(1):
            torch.testing.assert_close(run(), first, rtol=0, atol=0)

    def test_an_operator_that_nobody_computes_is_named(self) -> None:
        with torch.library._scoped_library("nowhere", "DEF") as library:
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", torch.empty_like, "Meta")
            x = torch.ones(500, 100).to("xla")
            good = x + 1
            with pytest.raises(Exception, match="nowhere"):
                y = torch.ops.nowhere.double(x)
                torch_xla.sync()
                y.cpu()
            torch_xla.sync()
            assert good.sum().item() == 100_000

    def test_threads(self) -> None:
        def work(rows: int) -> None:
            for i in range(8):
                torch.testing.assert_close(step(rows + i), step(rows + i, "cpu"), rtol=1e-5, atol=1e-6)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, (2, 20, 40)))  # which raises what failed
