"""Programs of many small reads, beside torch eager: `python -m benchmarks.reads all xla` takes one, in this process.

Each side has a process of its own and one thread for operators, as in `changing.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.processes import measured

Figures = dict[str, float]
Step = Callable[[], object]

ROUNDS = 3
FIRST = 40  # steps that may compile


def check_all(device: str) -> Step:
    """A condition on few values."""
    x = torch.ones(8, dtype=torch.bool).to(device)
    return lambda: bool(x.all())


def chain(device: str) -> Step:
    """Eight operators and a read."""
    x, y = (torch.randn(8).to(device) for _ in range(2))
    return lambda: ((x * y + x).abs().sqrt() - y).exp().clamp(max=2.0).sum().item()


def normal(device: str) -> Step:
    """A distribution that checks its arguments."""
    loc, scale = torch.zeros(8).to(device), torch.ones(8).to(device)
    return lambda: torch.distributions.Normal(loc, scale, validate_args=True)


def svi(device: str) -> Step:
    """A step of variational inference: a guide, a model, their densities, and the loss as a number."""
    from torch.distributions import Gamma, Normal

    data = torch.randn(32).to(device)
    loc, log_scale = (torch.nn.Parameter(torch.zeros((), device=device)) for _ in range(2))
    optimizer = torch.optim.Adam([loc, log_scale], lr=0.01)
    rate = torch.ones((), device=device)

    def step() -> float:
        optimizer.zero_grad()
        guide = Normal(loc, log_scale.exp(), validate_args=True)
        mean = guide.rsample()
        prior, noise = Normal(0.0 * rate, 10.0 * rate, validate_args=True), Gamma(rate, rate, validate_args=True)
        likelihood = Normal(mean, noise.mean, validate_args=True).log_prob(data).sum()
        loss = guide.log_prob(mean) - prior.log_prob(mean) - likelihood
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def dopri5(device: str) -> Step:
    """Steps of a solver whose length depends on the error that it reads."""
    weight = (torch.randn(16, 16) / 4).to(device)
    state = {"y": torch.randn(16).to(device), "h": 0.1}

    def step() -> None:
        y, h = state["y"], state["h"]
        k1 = torch.tanh(weight @ y)
        k2 = torch.tanh(weight @ (y + h * 0.5 * k1))
        k3 = torch.tanh(weight @ (y + h * 0.75 * k2))
        new = y + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
        k4 = torch.tanh(weight @ new)
        error = h * (-5 * k1 / 72 + k2 / 12 + k3 / 9 - k4 / 8)
        ratio = (error / (1e-4 + 1e-4 * torch.maximum(y.abs(), new.abs()))).pow(2).mean().sqrt()
        if bool(ratio <= 1):
            state["y"] = new
        state["h"] = h * min(2.0, max(0.5, 0.9 * float(ratio) ** (-1 / 3)))

    return step


def shrinking(device: str) -> Step:
    """A metric that compares each value with those behind it, and looks at what it finds."""
    x = torch.randn(64).to(device)

    def step() -> float:
        pairs = torch.zeros((), device=device)
        for i in range(len(x) - 1):
            larger = x[i + 1 :] > x[i]
            if larger.any():
                pairs = pairs + larger.float().mean()
        return pairs.item()

    return step


def detection(device: str) -> Step:
    """Boxes, ever other numbers of them: those that overlap with none before them, and a loss of these."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 4).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def step() -> float:
        count = int(torch.randint(20, 200, (), generator=generator))
        corners = torch.rand(count, 2, generator=generator)
        boxes = torch.cat([corners, corners + 0.1], dim=1).to(device)
        low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        kept = boxes[(shared > 0.002).tril(-1).sum(1) == 0]
        loss = (kept @ weight).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


CASES = {
    "all": (check_all, 1000, "bool(x.all())"),
    "chain": (chain, 300, "8 operators and item()"),
    "normal": (normal, 300, "Normal(loc, scale)"),
    "svi": (svi, 40, "variational inference"),
    "dopri5": (dopri5, 100, "an adaptive solver"),
    "shrinking": (shrinking, 3, "a metric over x[i + 1:]"),
    "detection": (detection, 20, "detection"),
}


def measure(name: str, device: str) -> Figures:
    """Seconds of the first steps, all together, and of one of the later ones; graphs compiled in both."""
    import torch_xla  # noqa: F401  # the device
    import torch_xla.debug.metrics as met

    torch.manual_seed(0)
    make, turn, _ = CASES[name]
    step = make(device)

    def seconds(steps: int) -> float:
        start = perf_counter()
        for _ in range(steps):
            step()
        return perf_counter() - start

    first = seconds(FIRST)
    compiles = met.counter_value("UncachedCompile") or 0
    later = min(seconds(turn) / turn for _ in range(7))
    return {
        "first": first,
        "later": later,
        "compiles": compiles,
        "later_compiles": (met.counter_value("UncachedCompile") or 0) - compiles,
    }


def reads(name: str) -> Figures:
    """A step ÷ torch eager's, the first ones ÷ eager's, and compiles."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    rounds = [
        (measured("reads", name, "xla", settings=one_thread), measured("reads", name, "cpu", settings=one_thread))
        for _ in range(ROUNDS)
    ]
    key = f"reads_{name}"
    return {
        f"{key}_ratio": median(ours["later"] / eager["later"] for ours, eager in rounds),
        f"{key}_us": median(ours["later"] for ours, _ in rounds) * 1e6,
        f"{key}_eager_us": median(eager["later"] for _, eager in rounds) * 1e6,
        f"{key}_first_ratio": median(ours["first"] / eager["first"] for ours, eager in rounds),
        f"{key}_compiles": rounds[0][0]["compiles"],
        f"{key}_later_compiles": rounds[0][0]["later_compiles"],
    }


MEASURES: dict[str, Callable[[], Figures]] = {f"reads_{name}": partial(reads, name) for name in CASES}


def lines() -> Iterator[tuple[Any, ...]]:
    """Rows of the table: key, words, unit, relation and target."""
    for name, (_, _, words) in CASES.items():
        yield f"reads_{name}_ratio", f"{words} / torch eager", "", "<=", 3.0
    for name in ("shrinking", "detection"):
        yield f"reads_{name}_later_compiles", f"compiles of {CASES[name][2]} after {FIRST} steps", "", "=", 0.0


def comparisons() -> Iterator[tuple[Any, ...]]:
    """Likewise of what has no target."""
    for name, (_, _, words) in CASES.items():
        yield f"reads_{name}_us", f"{words}, torch_xla", "us"
        yield f"reads_{name}_eager_us", f"{words}, torch eager CPU", "us"
        yield f"reads_{name}_first_ratio", f"first {FIRST} of {words} / torch eager", ""
        yield f"reads_{name}_compiles", "  graphs compiled meanwhile", ""


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
