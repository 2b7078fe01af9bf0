"""Loops without a barrier are cut where they repeat: values as on CPU, and few more programs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import cuts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_xla
from torch_xla import _bindings, experimental
from torch_xla._core.compile import cache

pytestmark = pytest.mark.usefixtures("capfd", "short_loops")

STEPS = 12

# A loop's body, which is given the step's number; a program gives that, and what to compare at the end.
Body = Callable[[int], None]
Program = Callable[[str], tuple[Body, Callable[[], list[Tensor]]]]


def run(program: Program, device: str, steps: int = STEPS, barrier: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    body, results = program(device)
    for step in range(steps):
        body(step)
        if barrier:
            torch_xla.sync()
    actual = [result.detach() for result in results()]
    return [result.cpu() for result in actual]


def check(program: Program, compiles: Counting, steps: int = STEPS, more: int = 2, **tolerance: float) -> int:
    """Compares a program without barriers with the CPU's; gives how many cuts it had."""
    with compiles() as marked:
        run(program, "xla", 4, barrier=True)
    torch_xla.sync()
    cache.clear()
    before = cuts()
    with compiles() as count:
        ours = run(program, "xla", steps)
    made = cuts() - before
    assert made > 0, "no loop was found"
    assert count.value <= marked.value + more, f"{count.value} compiles, {marked.value} with a barrier"
    torch.testing.assert_close(ours, run(program, "cpu", steps), **tolerance)
    return made


def network(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), *parts, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(optimizer: Callable[..., Any], *parts: Callable[[], nn.Module], **options: Any) -> Program:
    def program(device: str) -> tuple[Body, Callable[[], list[Tensor]]]:
        model = network(*(part() for part in parts)).to(device)
        chosen = optimizer(model.parameters(), **options)
        batches = torch.randn(STEPS, 8, 6)

        def body(step: int) -> None:
            chosen.zero_grad()
            loss = model(batches[step % STEPS].to(device)).square().mean()
            loss.backward()
            chosen.step()

        return body, lambda: [*model.state_dict().values()]

    return program


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(trained(torch.optim.SGD, lr=0.1, momentum=0.9), id="sgd"),
        pytest.param(trained(torch.optim.AdamW, lr=0.01), id="adamw"),
        pytest.param(trained(torch.optim.SGD, lambda: nn.BatchNorm1d(16), nn.ReLU, lr=0.1), id="batch-norm"),
    ],
)
def test_training(program: Program, compiles: Counting) -> None:
    assert check(program, compiles, rtol=1e-4, atol=1e-5) > 3


def accumulated(device: str) -> tuple[Body, Callable[[], list[Tensor]]]:
    model = network().to(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.randn(5, 8, 6)

    def body(step: int) -> None:
        for micro in range(3):
            (model(batches[(step + micro) % 5].to(device)).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)

    return body, lambda: [*model.parameters(), *average.parameters()]


def test_accumulation_clipping_and_averages(compiles: Counting) -> None:
    check(accumulated, compiles, rtol=1e-4, atol=1e-5)


def adversaries(device: str) -> tuple[Body, Callable[[], list[Tensor]]]:
    maker, judge = nn.Linear(4, 6).to(device), network().to(device)
    for_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    for_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    noise, real = torch.randn(STEPS, 8, 4), torch.randn(STEPS, 8, 6)

    def body(step: int) -> None:
        made = maker(noise[step].to(device))
        for_judge.zero_grad()
        (judge(real[step].to(device)).mean() - judge(made.detach()).mean()).backward()
        for_judge.step()
        for_maker.zero_grad()
        judge(made).mean().backward()
        for_maker.step()

    return body, lambda: [*maker.parameters(), *judge.parameters()]


def test_two_optimizers(compiles: Counting) -> None:
    check(adversaries, compiles, rtol=1e-3, atol=1e-5)


def evaluated(device: str) -> tuple[Body, Callable[[], list[Tensor]]]:
    model = network(nn.ReLU(), nn.Linear(16, 16), nn.ReLU()).to(device).eval()
    batches, labels = torch.randn(8, 8, 6), torch.randint(0, 4, (8, 8))
    right = torch.zeros((), device=device)
    losses: list[Tensor] = []

    def body(step: int) -> None:
        with torch.no_grad():
            given, expected = model(batches[step % 8].to(device)), labels[step % 8].to(device)
            right.add_((given.argmax(-1) == expected).sum())
            losses.append(nn.functional.cross_entropy(given, expected))

    return body, lambda: [right, torch.stack(losses)]


def test_evaluation_that_keeps_a_list(compiles: Counting) -> None:
    check(evaluated, compiles, steps=40)


def collected(device: str) -> tuple[Body, Callable[[], list[Tensor]]]:
    """Acts without gradients a few times, then learns from it in several passes."""
    policy = network().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    noise = torch.randn(STEPS, 4, 8, 6)

    def body(step: int) -> None:
        seen, result = noise[step % STEPS].to(device), []
        state = seen[0]
        with torch.no_grad():
            for turn in range(4):
                chosen = policy(state)
                result.append((state, chosen.softmax(-1)))
                state = seen[turn] + 0.1 * chosen.mean()
        for _ in range(2):
            optimizer.zero_grad()
            sum((policy(x).softmax(-1) / p - 1).square().mean() for x, p in result).backward()  # type: ignore[union-attr]
            optimizer.step()

    return body, lambda: [*policy.parameters()]


@pytest.mark.own_client("gradients of rounding errors, which Adam makes large, are others in each XLA")
@pytest.mark.costs("programs of some hundred operators")
def test_collect_and_update(compiles: Counting) -> None:
    check(collected, compiles, rtol=1e-3, atol=1e-4)


def read(every: int, before: bool) -> tuple[Program, list[float]]:
    """Training that reads its loss in every n-th step, before or after the optimizer's."""
    values: list[float] = []

    def program(device: str) -> tuple[Body, Callable[[], list[Tensor]]]:
        model = network().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = torch.randn(STEPS, 8, 6)

        def body(step: int) -> None:
            optimizer.zero_grad()
            loss = model(batches[step % STEPS].to(device)).square().mean()
            loss.backward()
            if before and step % every == every - 1:
                values.append(loss.item())
            optimizer.step()
            if not before and step % every == every - 1:
                values.append(loss.item())

        return body, lambda: [*model.parameters()]

    return program, values


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("every", [1, 5])
def test_reads_cost_few_more_compiles(every: int, before: bool, compiles: Counting) -> None:
    counts = {}
    for n in (1000, every):
        cache.clear()
        program, values = read(n, before)
        with compiles() as count:
            ours = run(program, "xla", 30)
        counts[n] = count.value
    # Where each step is read in its middle there are two graphs a step, of which one is the read's.
    assert counts[every] <= counts[1000] + (2 if before and every == 1 else 1)
    program, expected = read(every, before)
    torch.testing.assert_close(ours, run(program, "cpu", 30), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
def test_memory_stays_flat() -> None:
    body, _ = trained(torch.optim.AdamW, lambda: nn.BatchNorm1d(16), nn.ReLU, lr=0.001)("xla")

    def resident(steps: int) -> int:
        for step in range(steps):
            body(step)
        torch_xla.sync(wait=True)
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = resident(200)
    assert resident(2000) < 1.02 * before


def test_sums_that_fit_no_step() -> None:
    """A few operators a step: many of them make a piece."""
    x = y = torch.linspace(0, 1, 4)
    x = x.to("xla")
    for _ in range(200):
        x = x * 0.999 + 0.001
        y = y * 0.999 + 0.001
    torch.testing.assert_close(x.cpu(), y)


@pytest.mark.usefixtures("all_told")
def test_it_is_told_once_with_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    run(trained(torch.optim.SGD, lr=0.1), "xla", 24)
    told = [line for line in capfd.readouterr().err.splitlines() if "a loop without a barrier" in line]
    assert len(told) == 1 and "test_auto_barrier.py" in told[0] and "operators repeat" in told[0]


def test_off() -> None:
    experimental.auto_barrier(False)
    before = cuts()
    run(trained(torch.optim.SGD, lr=0.1), "xla", 5)
    assert cuts() == before and not _bindings.traces_calls()


def test_a_loop_with_barriers_is_let_be(compiles: Counting) -> None:
    program = trained(torch.optim.SGD, lr=0.1)
    before = cuts()
    with compiles() as without:
        run(program, "xla", 3, barrier=True)
    with compiles(0):
        run(program, "xla", 12, barrier=True)
    assert cuts() == before and without.value <= 4


def layers(count: int, gradients: bool) -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()) for _ in range(count))).to("xla")
    x = torch.randn(2, 4).to("xla")
    torch_xla.sync()
    with torch.set_grad_enabled(gradients):
        y = deep(x)
    if gradients:
        y.sum().backward()
    torch_xla.sync()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.costs("programs of some hundred operators")
def test_layers_are_no_loop(gradients: bool) -> None:
    before = cuts()
    layers(80, gradients)
    assert cuts() == before


class Gates(nn.Module):
    """A cell written by hand, with a state of two."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(4, 16), nn.Linear(4, 16)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        a, b, c, d = (self.of_input(x) + self.of_state(h)).chunk(4, 1)
        return torch.sigmoid(a) * torch.tanh(torch.sigmoid(b) * h + torch.sigmoid(c) * d.tanh())


class Block(nn.Module):
    """A layer whose weights all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.down(nn.functional.gelu(self.up(self.norm(h)))) + x


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    return lambda cell, x, h: checkpoint(cell, x, h, use_reentrant=reentrant)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda cell, x, h: cell(x, h), id="plain"),
        pytest.param(checkpointed(False), id="checkpoint"),
        pytest.param(checkpointed(True), id="reentrant"),
    ],
)
@pytest.mark.parametrize("make", [lambda: nn.RNNCell(4, 4), lambda: nn.GRUCell(4, 4), Gates, Block])
def test_cells_with_gradients_are_no_loop(make: Callable[[], nn.Module], call: Callable[..., Tensor]) -> None:
    """Neither their forward pass is one nor their backward pass."""
    cell = make().to("xla")
    x, h = torch.randn(2, 4).to("xla"), torch.zeros(2, 4).to("xla").requires_grad_()
    torch_xla.sync()
    before = cuts()
    for _ in range(40):
        h = call(cell, x, h)
    h.sum().backward()
    assert cuts() == before


def test_a_backward_pass_by_itself_is_no_loop() -> None:
    """The loss is read before, so that it uses up values that are on the device."""
    cell = nn.GRUCell(4, 4).to("xla")
    x, h = torch.randn(2, 4).to("xla"), torch.zeros(2, 4).to("xla")
    torch_xla.sync()
    before = cuts()
    for _ in range(20):
        h = cell(x, h)
    loss = h.sum()
    loss.item()
    loss.backward()
    assert cuts() == before
