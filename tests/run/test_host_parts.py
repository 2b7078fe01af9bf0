"""Graphs that grow by token ids, positions and counters: the host computes these parts, and the rest is one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import setting

import torch_xla
from torch_xla import _config
from torch_xla._core.compile import cache, compiler
from torch_xla._core.execute import op_by_op

pytestmark = [
    pytest.mark.compiled("it is what these tests are about", reads=False),
    pytest.mark.usefixtures("nothing_compiled"),
]

WORDS, WIDTH = 64, 300  # more values than a very small graph has


class Model:
    """One token from the latest one and its position, and a count of them that is advanced after its use."""

    def __init__(self, device: str) -> None:
        draw = torch.Generator().manual_seed(1)
        self.table = torch.randn(WORDS, WIDTH, generator=draw).to(device)
        self.head = torch.randn(WIDTH, WORDS, generator=draw).to(device)
        self.count = torch.zeros((), dtype=torch.int64).to(device)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        at = torch.arange(1, device=ids.device) + self.count
        self.count.add_(1)
        hidden = self.table[ids[:, -1]] * (positions[:, -1:] + at).float().cos()
        return torch.sin(hidden @ self.head).argmax(-1)


def generate(device: str, turns: int = 8, turned: Callable[[int], None] = lambda turn: None) -> list[Any]:
    model = Model(device)
    ids = torch.tensor([[3, 5], [7, 1]]).to(device)
    positions = torch.arange(2, device=device).expand(2, 2).clone()
    flags = []
    for turn in range(turns):
        token = model(ids, positions)
        positions = torch.cat([positions, positions[:, -1:] + 1], 1)
        ids = torch.cat([ids, token[:, None]], 1)
        flags.append(bool((ids[:, -1:] == 9).any()))
        turned(turn)
    return [flags, ids.tolist(), positions.tolist(), model.count.item()]


def test_tokens_that_are_appended(compiles: Counting, counted: Counting) -> None:
    with compiles(2), counted("HostParts", 7):  # all of the graph, then what of it does not grow
        assert generate("xla") == generate("cpu")
    with compiles(0):
        assert generate("xla") == generate("cpu")
        assert generate("xla", 12) == generate("cpu", 12)


def test_a_graph_that_is_known_is_not_divided(counted: Counting, compiles: Counting) -> None:
    with setting(_config.XLA_HOST_COMPUTE, "never"), compiles(8 + 2):  # and two for what is read at the end
        generate("xla")
    with counted("HostParts", 0), compiles(0):
        generate("xla")


def test_numbers_of_a_part_that_vary_are_inputs(counted: Counting, compiles: Counting) -> None:
    model = Model("xla")
    host = Model("cpu")
    with counted("HostParts", 0), compiles(1):
        for i in range(5):
            for each in (model, host):
                ids = torch.tensor([[3, 5], [7, 1]]).to(each.table.device)
                result = each.table[(ids * (i + 2)) % WORDS].sum((1, 2)).sin()
                if each is model:
                    first = result.tolist()
            assert first == pytest.approx(result.tolist(), abs=1e-3)


@pytest.mark.costs("programs of some hundred operators")
def test_what_is_drawn_stays_on_the_device(compiles: Counting) -> None:
    def draw() -> list[Any]:
        torch.manual_seed(3)
        model = Model("xla")
        ids = torch.tensor([[3, 5], [7, 1]]).to("xla")
        results = []
        for _ in range(5):
            more = torch.randint(WORDS, (2, 1), device="xla")
            ids = torch.cat([ids, more], 1)
            results.append(model(ids, ids).tolist())
        return [results, ids.tolist()]

    with setting(_config.XLA_HOST_COMPUTE, "never"):
        expected = draw()
    cache.clear()
    assert draw() == expected


def test_parts_that_are_too_large_are_compiled(counted: Counting) -> None:
    with counted("HostParts", 0):
        for length in (5000, 5001, 5002):
            ids = torch.arange(length).to("xla")
            table = torch.arange(20000.0).to("xla")
            more = torch.cat([ids, ids[-1:]]) + 1
            assert table[more[-1]].item() == float(length)


def test_views_and_writes(compiles: Counting) -> None:
    """Tensors that are written in place, through views, by all three parts; what is held of them is theirs."""

    def turns(device: str) -> list[Any]:
        model = Model(device)
        ids = torch.tensor([[3, 5], [7, 1]]).to(device)
        marks = torch.zeros(2, 40, dtype=torch.int64).to(device)
        held = []
        for turn in range(6):
            last = ids[:, -1]
            last.add_(1).remainder_(WORDS)
            row = marks[0]
            row[turn] = 7
            token = model(ids, ids)
            marks[:, turn + 1].add_(token)
            before = ids
            ids = torch.cat([ids, token[:, None]], 1)
            ids[0] += 1
            ids.remainder_(WORDS)
            held.append((before, row))
            if (ids[:, -1] == 9).any():
                held.append((ids, row))
        return [ids.tolist(), marks.tolist(), [(b.tolist(), r.tolist()) for b, r in held]]

    assert turns("xla") == turns("cpu")


def test_a_failure_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = compiler.lower
    calls = []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the rest of the graph, after its first part was computed
            raise RuntimeError("[lower] planted")
        return lower(*arguments)

    monkeypatch.setattr(compiler, "lower", failing)
    model = Model("xla")
    ids = torch.tensor([[3, 5], [7, 1]]).to("xla")

    def turn(ids: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([ids, model(ids, ids)[:, None]], 1)
        (ids[:, -1:] == 9).any().item()
        return ids

    ids = turn(ids)
    before = ids.tolist()
    with pytest.raises(RuntimeError, match="planted"):
        turn(ids)
    assert ids.tolist() == before and model.count.item() in (1, 2)
    model.count.fill_(1)
    assert turn(ids)[:, :-1].tolist() == before


def test_an_interrupt_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(turn: int) -> None:
        if turn == 4:
            monkeypatch.setattr(op_by_op, "run", raising)

    def raising(*arguments: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate("xla", 8, interrupted)
    assert generate("xla") == generate("cpu")


def test_a_profile_tells() -> None:
    with torch_xla.debug.profile() as profiled:
        generate("xla", 5)
    assert sum(read.divided for read in profiled.report.reads) == 4
    assert "small parts of 4 graphs were computed on the host" in str(profiled).replace("\n", " ").replace("  ", " ")


OPERATIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: torch.cat([x, x[:, -1:]], 1),
    lambda x: x + 1,
    lambda x: x.cumsum(1) % WORDS,
    lambda x: x[:, 1:] if x.shape[1] > 2 else x,
    lambda x: x.clone().add_(x[:, :1]),
    lambda x: torch.where(x > 9, x, -x),
    lambda x: x.flip(1),
]


@settings(max_examples=4)
@given(st.lists(st.lists(st.sampled_from(range(len(OPERATIONS))), max_size=4), min_size=3, max_size=4), st.booleans())
def test_any_operators(program: list[list[int]], keeps: bool) -> None:
    def run(device: str) -> list[Any]:
        model = Model(device)
        ids = torch.tensor([[3, 5], [7, 1]]).to(device)
        kept, read = [], []
        for steps in program:
            for step in steps:
                ids = OPERATIONS[step](ids)
                if keeps:
                    kept.append(ids)
            ids = ids.abs() % WORDS
            token = model(ids, ids)
            for step in reversed(steps):
                token = OPERATIONS[step](token[:, None].expand(2, 2))[:, 0].abs() % WORDS
            read.append(token.sum().item())
            ids = torch.cat([ids, token[:, None]], 1)
        return [read, ids.tolist(), [k.tolist() for k in kept], model.count.item()]

    assert run("xla") == run("cpu")
