"""Horizontal fusion: a pack's members are updated by one kernel, and nobody can tell."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import pytest
import rotation
import torch
from agreement import on_both
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla._core.graph import graph
from torch_xla._core.lower import horizontal
from torch_xla._core.lower.calling_convention import ProgramSignature, number_indices
from torch_xla.debug import metrics

pytestmark = pytest.mark.optimized("the same bits come of two programs, which are optimised apart")

Update = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]

SHAPES = ((3,), (2, 5), (1,), (7, 1, 2), (), (4,), (3,), (2, 2))


def of_each(update: Callable[[torch.Tensor, torch.Tensor, int], object]) -> Update:
    """`update` for each tensor, another one of its shape, and its index."""

    def run(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        for index, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
            update(tensor, other, index)

    return run


def clipped(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    norm = torch.stack([other.norm() for other in others]).norm()
    for tensor, other in zip(tensors, others, strict=True):
        tensor.sub_(other * (1 / (norm + 1)))


def by_turns(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for index, (tensor, other) in enumerate(zip(tensors, others, strict=True)):
        tensor.mul_(0.5).add_(other) if index % 3 else tensor.mul_(other).sub_(0.5)


def of_the_neighbour(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(others[0].sum())
    before = [tensor.clone() for tensor in tensors]
    for tensor, other in zip(tensors, reversed(before), strict=True):
        tensor.add_(other.sum(), alpha=0.5)


def in_a_chain(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    value = others[0].sum()
    for tensor in tensors:
        value = tensor.add_(value).mean()


UPDATES: dict[str, Update] = {
    "numbers": of_each(lambda t, o, k: t.mul_(0.9).add_(o, alpha=0.3)),
    "numbers of their own": of_each(lambda t, o, k: t.mul_(1 - 0.1 * k).add_(o, alpha=0.3 + k)),
    "a number and values": of_each(lambda t, o, k: t.lerp_(o, 0.1 * (k % 3))),
    "lerp by values": of_each(lambda t, o, k: t.lerp_(o, o.sigmoid())),
    "addcmul": of_each(lambda t, o, k: t.addcmul_(o, o, value=0.1 * k)),
    "addcdiv": of_each(lambda t, o, k: t.addcdiv_(o, o.abs() + 1, value=-0.5 * k)),
    "division": of_each(lambda t, o, k: t.div_(3 + k).div_(o.abs().add_(0.1))),
    "rounded division": of_each(lambda t, o, k: t.div_(o.abs() + 0.5, rounding_mode="floor")),
    "integers": of_each(lambda t, o, k: t.add_(2).mul_(k)),
    "powers": of_each(lambda t, o, k: t.abs_().add_(1).pow_(0.3 * (k % 4))),
    "limits": of_each(lambda t, o, k: t.clamp_(-0.1 * k, 0.5).clamp_(max=o)),
    "where": of_each(lambda t, o, k: t.copy_(torch.where(t > 0.2 * k, t, o))),
    "masked": of_each(lambda t, o, k: t.masked_fill_(o > 0, 0.25 * k)),
    "signs": of_each(lambda t, o, k: t.neg_().mul_(o.sign()).add_(o.sqrt().nan_to_num_(0.5))),
    "types": of_each(lambda t, o, k: t.mul_(o.double()).add_(o.to(torch.bfloat16), alpha=2)),
    "fills": of_each(lambda t, o, k: t.fill_(0.5 * k)),
    "sums": of_each(lambda t, o, k: t.add_((t * o).sum())),
    "logarithms": of_each(lambda t, o, k: t.abs_().add_(0.5).log_().mul_(o.exp())),
    "clipped": clipped,
    "by turns": by_turns,
    "of the neighbour": of_the_neighbour,
    "in a chain": in_a_chain,
}


def made(device: str, count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPES[k % len(SHAPES)], generator=generator).to(device) for k in range(count)]


@pytest.mark.parametrize("count", [4, 11, 23])
@pytest.mark.parametrize("name", UPDATES)
def test_as_one_by_one(name: str, count: int, compiles) -> None:
    (tensors, others), (expected, given) = ((made(d, count), made(d, count, 1)) for d in ("xla", "cpu"))
    torch_xla.sync()
    with compiles(1):
        for _ in range(3):
            UPDATES[name](tensors, others)
            torch_xla.sync()
    for _ in range(3):
        UPDATES[name](expected, given)
    torch.testing.assert_close(tensors, expected, check_device=False)


Round = tuple[str, list[int], bool, int]

STEPS: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor], int, float, int], object]] = {
    "scale": lambda t, o, i, x, k: t[i].mul_(x),
    "add": lambda t, o, i, x, k: t[i].add_(o[i], alpha=x),
    "divide": lambda t, o, i, x, k: t[i].addcdiv_(o[i], o[i] + 1, value=x),
    "choose": lambda t, o, i, x, k: t[i].copy_(torch.where(o[i] > 0.5, t[i], o[i])),
    "exchange": lambda t, o, i, x, k: (t.insert(i, o[i]), o.__setitem__(i, t.pop(i + 1))),
    "of one": lambda t, o, i, x, k: t[i].mul_(o[k].mean()),
    "of a sum": lambda t, o, i, x, k: t[i].add_(t[k].sum() * 0.01),
    "copy": lambda t, o, i, x, k: t[i].copy_(o[i]),
    "anew": lambda t, o, i, x, k: o.__setitem__(i, t[i] * x),
    "largest": lambda t, o, i, x, k: t.__setitem__(i, torch.maximum(t[i], o[i])),
}


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[Round]]:
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=4, max_size=12))
    members = st.lists(st.integers(0, len(shapes) - 1), min_size=2, max_size=len(shapes), unique=True)
    everyone = st.just(list(range(len(shapes))))
    one = st.tuples(
        st.sampled_from([*STEPS, "barrier"]), everyone | members, st.booleans(), st.integers(0, len(shapes) - 1)
    )
    return shapes, draw(st.lists(one, min_size=1, max_size=6))


@settings(max_examples=16)
@seed(rotation.number("any updates") % 2**32)
@given(rounds())
@pytest.mark.costs("many random programs")
def test_any_updates(program: tuple[list[tuple[int, ...]], list[Round]]) -> None:
    shapes, steps = program
    ends = []
    for device in ("xla", "cpu"):
        generator = torch.Generator().manual_seed(0)
        t, o = ([torch.rand(shape, generator=generator).to(device) for shape in shapes] for _ in range(2))
        torch_xla.sync()
        for _ in range(2):
            for name, members, own, k in steps:
                for i in members if name != "barrier" else ():
                    STEPS[name](t, o, i, 0.5 + 0.1 * (i if own else k), k)
                if name == "barrier":
                    torch_xla.sync()
            torch_xla.sync()
        ends.append([tensor.cpu() for tensor in t + o])
    for got, expected in zip(*ends, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def kernels(optimizer: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer], count: int) -> int:
    """Instructions of the program that updates so many parameters."""
    parameters = [torch.ones(6, device="xla").requires_grad_() for _ in range(count)]
    for k, parameter in enumerate(parameters):
        parameter.grad = torch.full((6,), 0.5 + k).to("xla")
    made = optimizer(parameters)
    torch_xla.sync()
    cache.clear()
    made.step()
    torch_xla.sync()
    (program,) = cache._executables.values()
    text = program.loaded.hlo_modules()[0].to_string()
    entry = text[text.index("\nENTRY") :]
    return len(re.findall(r" (?:fusion|add|multiply|concatenate|dynamic-slice|slice)\(", entry))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 + 0.1 * k} for k, q in enumerate(p)], lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["SGD", "a rate for each", "AdamW", "RMSprop", "Adagrad"],
)
def test_kernels_do_not_grow_with_the_parameters(optimizer) -> None:
    assert kernels(optimizer, 24) <= kernels(optimizer, 6) + 2


def test_a_schedule_that_starts_at_zero(compiles) -> None:
    """Zeros travel apart, and the program of the first step is that of all."""

    def train(device: str, steps: int) -> list[torch.Tensor]:
        parameters = [t.requires_grad_() for t in made(device, 9)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        for _ in range(steps):
            optimizer.zero_grad()
            sum((p * p).sum() for p in parameters).backward()
            optimizer.step()
            schedule.step()
            torch_xla.sync()
        return [p.detach().cpu() for p in parameters]

    torch.testing.assert_close(train("xla", 6), train("cpu", 6))
    with compiles(0):
        train("xla", 3)


def plan() -> horizontal.HorizontalPlan:
    """Of what is pending on the device."""
    described = graph.describe(_bindings.Cut.of_device(0).graph())
    convention = ProgramSignature(described)
    packs = convention.input_packs, convention.result_packs
    return horizontal.HorizontalPlan(described, number_indices(described), *packs)


def state(count: int) -> list[torch.Tensor]:
    tensors = made("xla", count)
    torch_xla.sync()
    return tensors


class TestPlan:
    def test_a_pack_that_is_updated_whole_takes_nothing_else(self) -> None:
        tensors = state(12)
        for tensor in tensors:
            tensor.mul_(0.5).add_(2.5).sqrt_()
        assert plan().singles == set()

    def test_a_common_scalar_is_taken(self) -> None:
        tensors = [torch.ones(3, device="xla") * k for k in range(8)]
        scalar = torch.tensor(2.5).to("xla")
        torch_xla.sync()
        for tensor in tensors:
            tensor.mul_(scalar)
        (edge,) = plan().singles
        assert edge.leaf

    def test_what_is_not_elementwise_is_taken_one_by_one(self) -> None:
        tensors = [torch.ones(3, device="xla") * k for k in range(8)]
        torch_xla.sync()
        for tensor in tensors:
            tensor.copy_(tensor.cumsum(0))
        assert len(plan().singles) == 8

    @pytest.mark.usefixtures("no_auto_barrier")
    def test_a_long_chain_ends_somewhere(self) -> None:
        tensors = state(4)
        expected = [tensor.cpu() for tensor in tensors]
        for group in (tensors, expected):
            for tensor in group:
                for _ in range(150):
                    tensor.mul_(1.01)
        assert len(plan().singles) == 4
        torch_xla.sync()
        for got, reference in zip(tensors, expected, strict=True):
            torch.testing.assert_close(got.cpu(), reference)

    def test_what_nothing_takes_one_by_one_is_not_lowered(self) -> None:
        from torch_xla._core.lower import lowering

        tensors = state(12)
        for tensor in tensors:
            tensor.mul_(2.5)
        text = lowering.lower(graph.describe(_bindings.Cut.of_device(0).graph())).stage.as_text()
        assert text.count("call @aten_mul_Tensor") == 1
        assert "dynamic_slice" not in text

    def test_only_what_is_taken_one_by_one_is_taken_out_of_a_pack(self) -> None:
        from torch_xla._core.lower import lowering

        tensors = state(12)
        for tensor in tensors:
            tensor.mul_(2.5)
        total = tensors[3].sum() + tensors[4].sum()
        text = lowering.lower(graph.describe(_bindings.Cut.of_device(0).graph())).stage.as_text()
        assert text.count("stablehlo.dynamic_slice") == 2
        del total


def test_old_and_new_values_are_both_read() -> None:
    tensors, twins = state(6), [t.cpu() for t in state(6)]
    results = []
    for group in (tensors, twins):
        before = [t + 1 for t in group]
        for t in group:
            t.mul_(0.5).add_(0.25)
        results.append([*before, *(t * 2 for t in group)])
    torch_xla.sync()
    torch.testing.assert_close(results[0] + tensors, results[1] + twins, check_device=False)


@on_both(functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_device=False))
def test_copies_of_a_model_follow(device: str) -> list[torch.Tensor]:
    """The moving average of a model, whose weights it reads after their update."""
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)]).to(device)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.ones(2, 4, device=device)).square().sum().backward()
        optimizer.step()
        average.update_parameters(net)
        torch_xla.sync()
    return list(average.parameters())


def test_counts_that_grow_by_one_scalar() -> None:
    *counts, skipped = (torch.zeros(()).to("xla") for _ in range(5))
    counts = [count.add_(1 - skipped) for count in counts]
    torch_xla.sync()
    assert [count.item() for count in counts] == [1.0] * 4 and metrics.counter_value("aten::sub") is None
