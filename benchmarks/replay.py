"""What a replayed step costs: beside hand-jitted JAX, beside a recorded step, and that of `torch.compile`'s graphs.

Of `torch.compile` calls that only infer, too.

`python -m benchmarks.replay` prints figures as JSON; they are taken in turns, each a median.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import workloads
from benchmarks.jax_steps import STEPS

ROUNDS = 7
Batches = Iterator[tuple[Tensor, ...]]
Step = Callable[..., Tensor]


def _mlp(model: nn.Module) -> tuple[Step, Any, None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer, None


def _gpt2(model: nn.Module) -> tuple[Step, Any, Any]:
    # A rate that a scheduler changes is an input of a replay only as a tensor.
    rate = torch.tensor(workloads.GPT2_RATE, device="xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=workloads.GPT2_STEPS)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer, scheduler


def _batches(name: str) -> Batches:
    if name == "mlp":
        return cycle([(x.contiguous().to("xla"), y.contiguous().to("xla")) for x, y in workloads.mlp_batches()])
    return cycle([(tokens.contiguous().to("xla"),) for tokens in workloads.licence_tokens(4, 128)])


class _Loop:
    """A training loop of a workload; `how` is "recorded", "replayed" or "dynamo"."""

    def __init__(self, name: str, how: str) -> None:
        import torch_xla

        self._sync = torch_xla.sync
        model = (workloads.mlp_model() if name == "mlp" else workloads.gpt2_model()).to("xla")
        net = torch.compile(model, backend="openxla") if how == "dynamo" else model
        self._step, _, self._scheduler = _mlp(net) if name == "mlp" else _gpt2(net)  # type: ignore[arg-type]
        self._replayed = how == "replayed"
        if self._replayed:
            self._step = torch_xla.compile(self._step, replay=True)
        self._batches = _batches(name)

    def _turn(self) -> Tensor:
        loss = self._step(*next(self._batches))
        if not self._replayed:
            self._sync()
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def host(self, steps: int) -> tuple[float, float]:
        """Wall and processor milliseconds of the host for a step, with the device idle."""
        wall, own = [], []
        for _ in range(steps):
            start, own_start = perf_counter(), thread_time()
            self._turn()
            own.append(thread_time() - own_start)
            wall.append(perf_counter() - start)
            self._sync(wait=True)
        return median(wall) * 1e3, median(own) * 1e3

    def pipelined(self, steps: int) -> float:
        """Milliseconds of one of so many steps that are not waited for."""
        start = perf_counter()
        for _ in range(steps):
            loss = self._turn()
        self._sync(wait=True)
        assert loss.device.type == "xla"
        return (perf_counter() - start) / steps * 1e3


def figures(name: str, steps: int) -> dict[str, float]:
    """Figures of one workload."""
    import torch_xla.debug.metrics as met

    loops = {how: _Loop(name, how) for how in ("recorded", "replayed", "dynamo")}
    hand = STEPS[name]()
    for loop in loops.values():
        loop.pipelined(12)

    hand.pipelined(steps)
    replays = met.counter_value("Replay") or 0
    rounds = [(*(loop.pipelined(steps) for loop in loops.values()), hand.pipelined(steps) * 1e3) for _ in range(ROUNDS)]
    assert (met.counter_value("Replay") or 0) - replays >= ROUNDS * steps
    hosts = [[loop.host(max(5, steps // 4)) for loop in loops.values()] for _ in range(ROUNDS)]
    found: dict[str, float] = {f"{name}_jax_step_ms": median(r[-1] for r in rounds)}
    for i, how in enumerate(loops):
        found[f"{name}_{how}_step_ms"] = median(r[i] for r in rounds)
        found[f"{name}_{how}_jax_ratio"] = median(r[i] / r[-1] for r in rounds)
        found[f"{name}_{how}_host_ms"] = median(h[i][0] for h in hosts)
        found[f"{name}_{how}_host_processor_ms"] = median(h[i][1] for h in hosts)
        found[f"{name}_{how}_host_ratio"] = median(h[i][1] / h[0][1] for h in hosts)
    return found


def inference(name: str, calls: int) -> dict[str, float]:
    """Figures of calls that only infer, recorded and by `torch.compile`."""
    import torch_xla

    model = workloads.mlp_model().to("xla").eval() if name == "mlp" else workloads.build(name, "xla").model
    latents = torch.randn(1, 4, 16, 16), torch.tensor(10), torch.randn(1, 8, 32)
    inputs: tuple[Tensor, ...] = (torch.randn(16, 32),) if name == "mlp" else latents
    moved = [x.to("xla") for x in inputs]
    compiled = torch.compile(model, backend="openxla")

    def timed(net: Callable[..., Any]) -> tuple[float, float]:
        start, own_start = perf_counter(), thread_time()
        for _ in range(calls):
            found = net(*moved)
            if net is model:
                torch_xla.sync()
        own = thread_time() - own_start
        torch_xla.sync(wait=True)
        del found
        return (perf_counter() - start) / calls * 1e3, own / calls * 1e3

    with torch.no_grad():
        rounds = [[timed(net) for net in (model, compiled)] for _ in range(ROUNDS + 1)][1:]
    found = {}
    for i, how in enumerate(("recorded", "dynamo")):
        found[f"{name}_inference_{how}_ms"] = median(r[i][0] for r in rounds)
        found[f"{name}_inference_{how}_host_processor_ms"] = median(r[i][1] for r in rounds)
        found[f"{name}_inference_{how}_host_ratio"] = median(r[i][1] / r[0][1] for r in rounds)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    inferred = inference("mlp", 200) | inference("unet", 15)
    print(json.dumps({**figures("mlp", 100), **figures("gpt2", 5), **inferred}, indent=1))
