"""Loops without a barrier whose tensors grow: where new graphs run operator by operator they are cut, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from conftest import Counting, following
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import cuts, setting
from torch import Tensor, nn
from torch.nn import functional

import torch_xla
from torch_xla import _bindings, _config
from torch_xla._core.compile import cache
from torch_xla._core.execute import auto_barrier, hotness
from torch_xla._core.report import recompiles

pytestmark = pytest.mark.by_default("new graphs are not compiled")

WIDTH, WORDS = 8, 20

# A program gives nothing after each turn, and in the end what to compare.
Program = Callable[[str, int], Iterator[Tensor | None]]


@pytest.fixture(autouse=True)
def when_hot() -> Iterator[None]:
    torch_xla.sync()
    cache.clear()
    hotness.clear()
    recompiles.clear()
    auto_barrier.forget()
    with ExitStack() as scope:
        scope.enter_context(setting(_config.XLA_HOST_COMPUTE, "new"))
        scope.enter_context(setting(_config.XLA_VERIFY_GRAPHS, False))
        scope.enter_context(following(True, first_look=100, least_segment=24))
        yield
        torch_xla.sync()
    hotness.clear()


class Attention(nn.Module):
    """With a cache that grows, or a mask over all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.of_all, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, 2, WIDTH // 2).transpose(1, 2) for part in self.of_all(self.norm(x)).chunk(3, 2))
        if kept is not None:
            k, v = torch.cat((kept[0], k), 2), torch.cat((kept[1], v), 2)
        scores = q @ k.transpose(-2, -1)
        if t > 1:
            scores = scores.masked_fill(torch.ones(t, t, device=x.device).tril()[None, None, :t, :t] == 0, -1e9)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH)), (k, v)


class Words(nn.Module):
    def __init__(self, device: str, longest: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_words, self.of_places = nn.Embedding(WORDS, WIDTH), nn.Embedding(longest, WIDTH)
        self.first, self.second, self.head = Attention(), Attention(), nn.Linear(WIDTH, WORDS)
        self.to(device).eval()

    def forward(
        self, ids: Tensor, kept: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        begin = kept[0][0].size(2) if kept else 0
        x = self.of_words(ids) + self.of_places(torch.arange(begin, begin + ids.size(1), device=ids.device))
        x, one = self.first(x, kept[0] if kept else None)
        x, two = self.second(x, kept[1] if kept else None)
        return self.head(x), [one, two]


@torch.no_grad()
def generated(device: str, turns: int) -> Iterator[Tensor | None]:
    """As minGPT does it: the whole text anew for each word, once it is long its end alone."""
    longest = 20
    model = Words(device, longest)
    ids = torch.tensor([[1, 2, 3]]).to(device)
    for _ in range(turns):
        logits, _ = model(ids if ids.size(1) <= longest else ids[:, -longest:])
        logits = logits[:, -1, :] / 0.9
        largest, _ = torch.topk(logits, 4)
        logits[logits < largest[:, [-1]]] = -float("inf")
        _, chosen = torch.topk(functional.softmax(logits, -1), 1)
        ids = torch.cat((ids, chosen), 1)
        yield None
    yield ids


@torch.no_grad()
def beams(device: str, turns: int) -> Iterator[Tensor | None]:
    model, wide = Words(device), 3
    ids = torch.tensor([[1, 2]]).to(device).expand(wide, 2)
    scores = torch.tensor([0.0, -1e4, -1e4]).to(device)
    now, kept = ids, None
    for _ in range(turns):
        logits, kept = model(now, kept)
        scores, places = (functional.log_softmax(logits[:, -1], -1) + scores[:, None]).view(-1).topk(wide)
        of = places // WORDS
        kept = [(k.index_select(0, of), v[of]) for k, v in kept]
        now = (places % WORDS)[:, None]
        ids = torch.cat((ids[of], now), 1)
        yield None
    yield from (ids, scores)


@torch.no_grad()
def listed(device: str, turns: int) -> Iterator[Tensor | None]:
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).to(device)
    rows = [torch.ones(1, WIDTH).to(device)]
    for _ in range(turns):
        for _ in range(4):
            seen = torch.cat(rows)
            mean = (seen @ weight).tanh().mean(0, keepdim=True) - seen.sum(0) * 0.01
        rows.append(mean)
        yield None
    yield torch.cat(rows)


def trained(device: str, turns: int) -> Iterator[Tensor | None]:
    """Batches of ever other lengths, and now and then a loss that is read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WORDS)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for turn in range(turns):
        ids = torch.arange(2 * (3 + turn * 7 % 41)).view(2, -1).remainder(WORDS).to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if turn % 10 == 9:
            losses.append(loss.item())
        yield None
    yield from (torch.tensor(losses), *(weight.detach() for weight in model.parameters()))


def run(program: Program, device: str, turns: int) -> tuple[list[Tensor], list[int]]:
    """What a program gives, and how many operators were pending after each turn."""
    results, waiting = [], []
    for result in program(device, turns):
        if result is not None:
            results.append(result.cpu())
        elif device == "xla":
            waiting.append(_bindings.Cut.of_device(0).preview().num_nodes)
    return results, waiting


@pytest.mark.own_client("on a plugin new graphs are compiled")
@pytest.mark.parametrize("program", [generated, beams, listed, trained])
def test_it_is_cut_in_each_turn(program: Program, compiles: Counting, counted: Counting) -> None:
    turns, before = 40, cuts()
    with compiles(0), counted("UncompiledRun") as ran:
        ours, waiting = run(program, "xla", turns)
    assert ran.value <= turns + 6 and cuts() - before > turns // 2
    assert max(waiting[turns // 2 :]) <= max(waiting[: turns // 2]) < 700
    torch.testing.assert_close(ours, run(program, "cpu", turns)[0], rtol=0, atol=0)


@pytest.mark.own_client("on a plugin new graphs are compiled")
def test_so_it_is_when_it_comes_again(counted: Counting) -> None:
    """A whole one is no measure of what a graph between two barriers has."""
    made = []
    for _ in range(3):
        before = cuts()
        run(beams, "xla", 20)
        made.append(cuts() - before)
    assert min(made) > 10


@pytest.mark.own_client("on a plugin new graphs are compiled")
@pytest.mark.usefixtures("all_told")
def test_it_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    run(beams, "xla", 20)
    told = [line for line in capfd.readouterr().err.splitlines() if "a loop without a barrier" in line]
    assert len(told) == 1 and "operators repeat in other sizes" in told[0]


@pytest.mark.parametrize("computed", ["reads", "never"])
def test_where_graphs_are_compiled_it_stays_whole(computed: str, compiles: Counting) -> None:
    before = cuts()
    with setting(_config.XLA_HOST_COMPUTE, computed), compiles(1):
        run(listed, "xla", 30)
    assert cuts() == before


def steady(device: str, turns: int) -> Iterator[Tensor | None]:
    """The first turns begin in other ways."""
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).to(device)
    x, velocity = torch.ones(3, WIDTH).to(device), None
    for turn in range(turns):
        for part in range(3):
            x = (x @ weight).tanh().sum(part % 2, keepdim=True) * 0.1 + x
        velocity = x.mean(0) if velocity is None else velocity * 0.9 + x.mean(turn % 2 if turn < 3 else 0).sum()
        x = x - velocity
        yield None
    yield x


def test_one_that_does_not_grow_is_cut_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[str, list[int]] = {}
    cut = auto_barrier._cut
    for computed in ("reads", "new"):
        sizes = places[computed] = []
        begin = _bindings.node_sequence()

        def noted(device: int, end: int, run: auto_barrier.Run, sizes: list[int] = sizes, begin: int = begin) -> None:
            sizes.append(end - begin)
            cut(device, end, run)

        monkeypatch.setattr(auto_barrier, "_cut", noted)
        with setting(_config.XLA_HOST_COMPUTE, computed), following(True, first_look=100, least_segment=24):
            for result in steady("xla", 40):
                assert result is None or result.cpu().isfinite().all()
    assert len(places["reads"]) >= 20 and places["reads"] == places["new"]


# What a body may do in a turn with its state, tensors of ever more rows of three, and two of their numbers.
CALLS: dict[str, Callable[[list[Tensor], int, int, int], object]] = {
    "grow": lambda ts, i, j, turn: ts.__setitem__(i, torch.cat((ts[i], ts[j][-1:]))),
    "tail": lambda ts, i, j, turn: ts.__setitem__(i, ts[i][-6:]),
    "mix": lambda ts, i, j, turn: ts.__setitem__(i, ts[i] * 0.9 + ts[j].mean(0)),
    "attend": lambda ts, i, j, turn: ts.__setitem__(i, (ts[i] @ ts[j].t()).softmax(-1) @ ts[j]),
    "row": lambda ts, i, j, turn: ts[i][turn % 2].mul_(0.5),
    "first": lambda ts, i, j, turn: ts[i][: turn % 3 + 1].sub_(ts[j][0] * 0.1),
    "last": lambda ts, i, j, turn: ts[i].t()[1].add_(0.1),
    "mask": lambda ts, i, j, turn: ts[i].masked_fill_(ts[i] > 1.037, 0.5),
    "order": lambda ts, i, j, turn: ts.__setitem__(i, ts[j].sort(0)[0]),
    "swap": lambda ts, i, j, turn: ts.append(ts.pop(0)),
}
NUMBERS = st.integers(0, 2)
CALL = st.tuples(st.sampled_from(sorted(CALLS)), NUMBERS, NUMBERS, st.sampled_from([1, 1, 1, 1, 2, 5]))
BODY = st.lists(CALL, min_size=3, max_size=8)


def chosen(body: list[tuple[str, int, int, int]], read: int) -> Program:
    def program(device: str, turns: int) -> Iterator[Tensor | None]:
        state = [torch.linspace(-1, k, 6).view(2, 3).to(device) for k in range(1, 4)]
        values, ends = [], []
        for turn in range(turns):
            for name, i, j, every in [("grow", 0, 1, 1), *body]:
                if turn % every == 0:
                    CALLS[name](state, i, j, turn)
            ends.append(state[turn % 3][-1])  # a view, which sees what is written later
            del ends[:-2]
            if turn % read == read - 1:
                values.append(state[1].sum().item())
            yield None
        yield from (*state, *ends, torch.tensor(values))

    return program


@settings(max_examples=10)
@given(BODY, st.sampled_from([7, 1000]), st.integers(20, 30))
def test_values_are_those_of_the_cpu(body: list[tuple[str, int, int, int]], read: int, turns: int) -> None:
    with following(True, first_look=20, least_segment=4):
        ours, expected = (run(chosen(body, read), device, turns)[0] for device in ("xla", "cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
