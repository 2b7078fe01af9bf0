"""Random programs of layers that repeat, with weights that are tied, replaced, aliased and read between their steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_xla

WIDTH = 4

Values = list[Tensor]
Op = Callable[[Any, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """What a layer may have: weights, a scalar, a running mean, a counter, a mask, a cache and nothing at all."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.tensor([draw.uniform(-1, 1) for _ in range(WIDTH**2)])[: WIDTH ** len(shape)]
                                .view(shape).double())  # fmt: skip

        self.w, self.v, self.bias = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH)
        self.scale = nn.Parameter(torch.tensor(draw.uniform(0.5, 1), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(draw.randrange(3)))
        self.register_buffer("mask", torch.tensor([draw.random() < 0.7 for _ in range(WIDTH)]))
        self.register_buffer("cache", torch.zeros(3, WIDTH, dtype=torch.float64))
        self.register_buffer("order", torch.tensor(draw.sample(range(WIDTH), WIDTH)))
        self.register_buffer("none", torch.zeros(0, WIDTH, dtype=torch.float64))
        self.norm = nn.LayerNorm(WIDTH).double()
        self.factor = draw.uniform(0.5, 1.5)


def _average(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    if layer.training:
        with torch.no_grad():
            layer.mean.lerp_(a.mean(0), 0.1)
            layer.count += 1
    return a - layer.mean


def _cached(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        layer.cache.index_copy_(0, (layer.count % 3)[None], a.detach()[:1])
    return a + layer.cache.mean(0)


OPS: dict[str, Op] = {
    "linear": lambda layer, a, b: nn.functional.linear(a, layer.w, layer.bias),
    "product": lambda layer, a, b: a @ layer.v,
    "turned": lambda layer, a, b: a @ layer.v.t() / 2,
    "both": lambda layer, a, b: a @ (layer.w + layer.v).tanh(),
    "norm": lambda layer, a, b: layer.norm(a),
    "tanh": lambda layer, a, b: torch.tanh(a),
    "add": lambda layer, a, b: a + b,
    "mix": lambda layer, a, b: a * layer.scale + b,
    "factor": lambda layer, a, b: a * layer.factor,
    "bias": lambda layer, a, b: a + layer.bias,
    "masked": lambda layer, a, b: a.masked_fill(~layer.mask, 0.1),
    "where": lambda layer, a, b: torch.where(layer.count > 1, a, b * 0.5),
    "softmax": lambda layer, a, b: torch.softmax(a, -1),
    "order": lambda layer, a, b: a[:, layer.order],
    "cat": lambda layer, a, b: torch.cat([a[:, 2:], b[:, :2]], 1),
    "none": lambda layer, a, b: a + torch.cat([layer.none, a]).sum(0) / 9,
    "sort": lambda layer, a, b: a.sort(-1).values,
    "split": lambda layer, a, b: a.chunk(2, 1)[1].repeat(1, 2),
    "complex": lambda layer, a, b: torch.fft.fft(a).real / WIDTH,
    "inplace": lambda layer, a, b: a.clone().mul_(0.5).add_(layer.bias),
    "average": _average,
    "cached": _cached,
}


class Model(nn.Module):
    """Layers of a random body, which carry one value or two, and give some of their values."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(draw) for _ in range(draw.choice([4, 5, 6, 7])))
        names = [draw.choice(["linear", "product", "turned", "both"]), *draw.choices(list(OPS), k=draw.randrange(1, 6))]
        draw.shuffle(names)
        self.body = [(name, draw.choice([-1, -1, -1, -2, 0]), draw.choice([-2, 0])) for name in names]
        self.carried = draw.choice([1, 1, 2])
        self.skip = draw.choice([None, None, "first", "hidden", "far", "own"])
        self.kept = draw.choice(["last", "last", "all", "some", "sum"])
        self.odd = draw.choice([None, None, None, draw.randrange(len(self.layers))])
        names = ["w", "v", "bias", "scale"]
        for _ in range(draw.choice([0, 0, 1, 2, 3])):
            a, b = (draw.randrange(len(self.layers)) for _ in range(2))
            name = draw.choice(names)
            other = draw.choice(["w", "v"]) if name in "wv" else name
            setattr(self.layers[a], name, getattr(self.layers[b], other))
        if draw.random() < 0.15:  # all have one
            for layer in self.layers:
                layer.bias = self.layers[0].bias
        for i in draw.sample(range(len(self.layers)), draw.choice([0, 0, 0, 1, 3])):
            self.layers[i].requires_grad_(False)
        if draw.random() < 0.2:
            name = draw.choice(names)
            for layer in self.layers:
                getattr(layer, name).requires_grad_(False)

    def forward(self, x: Tensor, depth: int | None = None, skipped: int | None = None) -> Values:
        first, state = x, [x * (k + 1) for k in range(self.carried)]
        hidden = [x]
        for i, layer in enumerate(self.layers[:depth]):
            if i == skipped:
                continue
            own = [state[-1], *state]
            for name, a, b in self.body:
                own.append(OPS[name](layer, own[a], own[b]))
            y = own[-1]
            if self.skip == "first":
                y = y + first
            elif self.skip == "hidden":
                y = y + sum(hidden) / 9
            elif self.skip == "far" and len(hidden) > 2:
                y = y + hidden[-3]
            elif self.skip == "own":
                y = y + hidden[-1]
            if i == self.odd:
                y = y * 1.5 + 1
            y = torch.tanh(y)
            state = [y, *state[:-1]] if self.carried == 1 else [y, state[0]]
            hidden.append(y)
        if self.kept == "all":
            return hidden[::-1]
        if self.kept == "some":
            return [hidden[-1], *hidden[1:-1:2]]
        return [hidden[-1], sum(hidden[:-1])] if self.kept == "sum" else [hidden[-1]]


def _optimizer(model: Model, draw: random.Random) -> torch.optim.Optimizer | None:
    groups: Any = [p for p in model.parameters() if p.requires_grad]
    if not groups or draw.random() < 0.15:
        return None
    if draw.random() < 0.25:
        groups = [{"params": [p], "lr": 0.01 * (1 + k % 3)} for k, p in enumerate(groups)]
    foreach = draw.choice([None, False, True])
    return draw.choice([
        lambda: torch.optim.SGD(groups, lr=0.01, momentum=draw.choice([0, 0.9]), foreach=foreach),
        lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=foreach),
        lambda: torch.optim.AdamW(groups, lr=0.01, foreach=foreach),
        lambda: torch.optim.Adam(groups, lr=0.01, amsgrad=draw.random() < 0.5, foreach=foreach),
        lambda: torch.optim.Adafactor(groups, lr=0.01, foreach=False),
        lambda: torch.optim.RMSprop(groups, lr=0.01, foreach=foreach),
        lambda: torch.optim.NAdam(groups, lr=0.01, foreach=foreach),
    ])()  # fmt: skip


class Run:
    """A program on one device: the same seed does the same on each."""

    def __init__(self, seed: int, device: str) -> None:
        self.draw, self.device = random.Random(seed), device
        self.model = Model(self.draw).to(device)
        self.optimizer = _optimizer(self.model, self.draw)
        self.found: Values = []
        self.held: Values = []  # aliases and copies, read at the end
        self.others: list[Model] = []
        self.way = self.draw.choice(["whole", "whole", "apart", "accumulated", "clipped", "checkpointed"])

    def run(self, turns: int) -> Values:
        for turn in range(turns):
            x = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH).to(self.device) * (turn + 1)
            self.step(x)
            if self.draw.random() < 0.8:
                torch_xla.sync()
            if self.draw.random() < 0.6:
                getattr(self, f"_{self.draw.choice(self.BETWEEN)}")(x)
        torch_xla.sync()
        values = [*self.found, *self.held, *self.model.state_dict().values()]
        for other in self.others:
            values += other.state_dict().values()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                values += [value for value in state.values() if isinstance(value, Tensor)]
        return [value.detach().cpu().clone() for value in values]

    def loss(self, x: Tensor, **how: Any) -> Tensor:
        if self.way == "checkpointed":
            given = torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False, **how)
        else:
            given = self.model(x, **how)
        return sum(((y**2).mean() for y in given), x.new_zeros(()))

    def step(self, x: Tensor, **how: Any) -> None:
        if self.optimizer is None:
            with torch.no_grad():
                self.found.append(self.loss(x, **how))
            return
        self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.7)
        for k in range(2 if self.way == "accumulated" else 1):
            loss = self.loss(x * (k + 1), **how)
            if loss.requires_grad:
                loss.backward()
            if self.way == "accumulated":
                torch_xla.sync()
        if self.way == "apart":
            torch_xla.sync()
        if self.way == "clipped":
            self.found.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))
        self.optimizer.step()
        self.found.append(loss.detach())

    BETWEEN = (
        "evaluate", "evaluate", "early", "skip", "read", "fill", "swap", "load", "alias", "copy", "average", "double",
        "freeze", "delete", "halve", "own_grads", "deepcopy", "tie", "mean_of_weights", "switch",
    )  # fmt: skip

    def _layer(self) -> Any:
        return self.draw.choice(list(self.model.layers))

    def _weight(self) -> Tensor:
        return getattr(self._layer(), self.draw.choice(["w", "v", "bias", "scale", "mean", "cache"]))

    @torch.no_grad()
    def _evaluate(self, x: Tensor) -> None:
        self.model.eval()
        self.found += self.model(x)
        self.model.train()
        if self.draw.random() < 0.5:
            torch_xla.sync()

    @torch.no_grad()
    def _early(self, x: Tensor) -> None:
        self.found += self.model(x, depth=self.draw.randrange(2, len(self.model.layers)))
        torch_xla.sync()

    def _skip(self, x: Tensor) -> None:
        self.step(x, skipped=self.draw.randrange(len(self.model.layers)))

    def _read(self, x: Tensor) -> None:
        self.found.append(self._weight().detach().cpu().clone())

    @torch.no_grad()
    def _fill(self, x: Tensor) -> None:
        self._weight().mul_(0.5)
        self._weight().fill_(0.25)

    def _swap(self, x: Tensor) -> None:
        weight = self._weight()
        weight.data = torch.full_like(weight, 0.125)

    def _load(self, x: Tensor) -> None:
        state = self.model.state_dict()
        if self.draw.random() < 0.5:
            state = {name: value.cpu().clone() for name, value in state.items()}
        names = list(state)
        state[names[0]], state[names[1]] = state[names[1]].clone(), state[names[0]].clone()
        self.model.load_state_dict(state)

    def _alias(self, x: Tensor) -> None:
        weight = self._weight().detach()
        self.held.append(self.draw.choice([weight, weight.view(-1)[1:], weight.unsqueeze(0)]))

    def _copy(self, x: Tensor) -> None:
        self.held += [getattr(layer, self.draw.choice(["w", "bias"])).detach().clone() for layer in self.model.layers]

    @torch.no_grad()
    def _average(self, x: Tensor) -> None:
        if not self.others:
            self.others.append(copy.deepcopy(self.model))
        for mine, theirs in zip(self.others[0].parameters(), self.model.parameters(), strict=False):
            if mine.shape == theirs.shape:
                mine.lerp_(theirs, 0.25)

    @torch.no_grad()
    def _double(self, x: Tensor) -> None:
        torch._foreach_mul_([layer.v for layer in self.model.layers], 1.25)

    def _freeze(self, x: Tensor) -> None:
        self._layer().requires_grad_(False)

    def _delete(self, x: Tensor) -> None:
        self.held, self.others = self.held[1:], []

    def _halve(self, x: Tensor) -> None:
        if len(self.model.layers) > 4 and self.optimizer is None:
            self.model.layers = self.model.layers[::2]

    @torch.no_grad()
    def _own_grads(self, x: Tensor) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad = p.grad.sign() * 0.5

    def _deepcopy(self, x: Tensor) -> None:
        self.others.append(copy.deepcopy(self.model))

    def _tie(self, x: Tensor) -> None:
        self._layer().w = self._layer().w

    @torch.no_grad()
    def _mean_of_weights(self, x: Tensor) -> None:
        self.found.append(torch.stack([layer.w for layer in self.model.layers]).mean(0))
        self.found += torch._foreach_norm([layer.v for layer in self.model.layers])

    @torch.no_grad()
    def _switch(self, x: Tensor) -> None:
        a, b = self._layer(), self._layer()
        a.v.data, b.v.data = b.v.data, a.v.data


def run(device: str, seed: int, turns: int = 4) -> Values:
    """A program's values, and those that are left at its end."""
    return Run(seed, device).run(turns)
