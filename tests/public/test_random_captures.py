"""Random steps that are captured and replayed, beside the same steps recorded, with what programs do between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torch_xla

SHAPE = (3, 4)
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True),
}
# What a step does with tensors that live on, `ts`, of which it may replace those of its own.
CALLS: dict[str, Callable[[list[Tensor], int, int], object]] = {
    "add": lambda ts, i, j: ts[i].add_(ts[j], alpha=0.1),
    "new": lambda ts, i, j: ts.__setitem__(i, (ts[j] * 0.9).sin()),
    "row": lambda ts, i, j: ts[i][j % 3].mul_(0.5),
    "column": lambda ts, i, j: ts[i].t()[1].sub_(ts[j][:, 0]),
    "view": lambda ts, i, j: ts.__setitem__(i, ts[j].view(-1)[:12].view(SHAPE)),
    "copy": lambda ts, i, j: ts[i].copy_(ts[j]),
    "clone": lambda ts, i, j: ts.__setitem__(i, ts[j].clone()),
    "fill": lambda ts, i, j: ts[i].fill_(0.3),
    "zeros": lambda ts, i, j: ts.__setitem__(i, torch.zeros(SHAPE, device="xla")),
    "host": lambda ts, i, j: ts[i].copy_(torch.full(SHAPE, 0.25)),
    "number": lambda ts, i, j: ts.__setitem__(i, torch.tensor(0.5, device="xla") * ts[j]),
    "clamp": lambda ts, i, j: ts[i].clamp_(-2, 2),
    "random": lambda ts, i, j: ts[i].add_(torch.rand_like(ts[j])),
    "normal": lambda ts, i, j: ts[i].normal_(0, 0.1),
    "mask": lambda ts, i, j: ts[i].masked_fill_(ts[j] > 0.4, 0.1),
    "swap": lambda ts, i, j: ts.__setitem__(slice(None), [*ts[1:], ts[0]]),
}
# What the program does between steps.
BETWEEN: dict[str, Callable[[list[Tensor], nn.Module, list[Tensor]], object]] = {
    "nothing": lambda ts, model, kept: None,
    "write": lambda ts, model, kept: ts[0].add_(0.5),
    "keep": lambda ts, model, kept: kept.append(ts[1].clone()),
    "pending": lambda ts, model, kept: kept.append(ts[0] * 2 + ts[1]),
    "view": lambda ts, model, kept: kept.append(ts[2][1]),
    "draw": lambda ts, model, kept: kept.append(torch.rand(2, device="xla")),
    "decay": lambda ts, model, kept: [p.data.mul_(0.9) for p in model.parameters()],
    "read": lambda ts, model, kept: kept.append(ts[1].cpu()),
    "gradients": lambda ts, model, kept: kept.extend(p.grad * 1 for p in model.parameters() if p.grad is not None),
    "barrier": lambda ts, model, kept: torch_xla.sync(),
}


@dataclass(frozen=True)
class Training:
    """What a step trains, and how."""

    optimizer: str
    dropout: bool
    normalized: bool
    clipped: bool
    averaged: bool
    accumulated: int
    cleared: str


CALL = st.tuples(st.sampled_from(sorted(CALLS)), st.integers(0, 3), st.integers(0, 3))
TRAINING = st.builds(
    Training,
    *(st.sampled_from(sorted(OPTIMIZERS)), st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 2),
    st.sampled_from(["none", "zero", "after", "never"]),
)
STEP = st.lists(CALL, min_size=1, max_size=8)
PLAN = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(sorted(BETWEEN))), min_size=2, max_size=8)


def run(replayed: bool, training: Training, steps: list[list[tuple[str, int, int]]], plan: list[tuple[int, str]]):  # type: ignore[no-untyped-def]
    torch.manual_seed(4)
    # Without a bias where its gradient would be noise, which some optimizers make large.
    layers: list[nn.Module] = [nn.Linear(4, 5, bias=not training.normalized), nn.Tanh(), nn.Linear(5, 2)]
    if training.normalized:
        layers.insert(1, nn.BatchNorm1d(5))
    if training.dropout:
        layers.insert(1, nn.Dropout(0.3))
    model = nn.Sequential(*layers).to("xla")
    average = copy.deepcopy(model)
    optimizer = OPTIMIZERS[training.optimizer](list(model.parameters()))
    state = [(torch.arange(12.0) * k % 5 / 5).reshape(SHAPE).to("xla") for k in range(1, 5)]

    def step(calls: list[tuple[str, int, int]]) -> Tensor:
        ts = list(state)
        if training.cleared in ("none", "zero"):
            optimizer.zero_grad(set_to_none=training.cleared == "none")
        with torch.no_grad():
            for name, i, j in calls:
                if ts[i] is ts[j] or not torch._C._is_alias_of(ts[i], ts[j]):  # else PyTorch refuses some
                    CALLS[name](ts, i, j)
        loss = torch.zeros((), device="xla")
        for _ in range(training.accumulated):
            part = F.mse_loss(model(ts[0]), ts[1][:, :2].detach().clone())
            part.backward()
            loss += part.detach()
        if training.clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if training.averaged:
            with torch.no_grad():
                for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    ours.mul_(0.8).add_(theirs, alpha=0.2)
        if training.cleared == "after":
            optimizer.zero_grad(set_to_none=False)
        return loss

    kept: list[Tensor] = []
    losses = [step(calls).clone() for calls in steps]  # warm-up
    graphs: dict[int, tuple[torch_xla.Graph, Tensor, list[Tensor | None]]] = {}
    for which, between in plan:
        if replayed:
            if which not in graphs:
                graph = torch_xla.Graph()
                with graph:
                    made = step(steps[which])
                graphs[which] = graph, made, [p.grad for p in model.parameters()]
            graph, made, gradients = graphs[which]
            graph.replay()
            losses.append(made.clone())
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient  # each graph makes its own
        else:
            losses.append(step(steps[which]).clone())
            torch_xla.sync()
        BETWEEN[between](state, model, kept)
    results = [*losses, *kept, *state, *model.state_dict().values(), *average.state_dict().values()]
    results += [p.grad for p in model.parameters() if p.grad is not None]
    results += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [t.cpu() for t in results]


@pytest.mark.fuzz
@settings(max_examples=max(settings.default.max_examples // 40, 1))
@given(TRAINING, st.lists(STEP, min_size=2, max_size=2), PLAN)
@pytest.mark.costs("many random programs")
def test_replays_are_what_recorded_steps_are(
    training: Training, steps: list[list[tuple[str, int, int]]], plan: list[tuple[int, str]]
) -> None:
    ours, expected = (run(replayed, training, steps, plan) for replayed in (True, False))
    assert len(ours) == len(expected)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5, equal_nan=True)
