"""What a step costs that is captured and replayed (`torch_xla.Graph`), beside hand-jitted JAX and the recorded step.

`python -m benchmarks.graphs` prints figures as JSON; they are taken in turns, each a median.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_xla
from benchmarks import workloads
from benchmarks.jax_parts import array
from benchmarks.jax_steps import mlp

ROUNDS = 9
WORDS, WIDTH = 256, 64
# Seconds of one of so many turns.
Loop = Callable[[int], float]


def _captured(step: Callable[..., Any], *static: Tensor) -> tuple[Any, Any]:
    for _ in range(2):
        step(*static)
        torch_xla.sync()
    graph = torch_xla.Graph()
    with graph:
        made = step(*static)
    return graph, made


def _timed(turn: Callable[[], Any], wait: Callable[[], None]) -> Loop:
    def loop(turns: int) -> float:
        start = perf_counter()
        for _ in range(turns):
            turn()
        wait()
        return (perf_counter() - start) / turns

    return loop


def _wait() -> None:
    torch_xla.sync(wait=True)


def _mlp_loops() -> dict[str, Loop]:
    """Workload (a): another batch is copied to the static one before each replay, on the device."""

    def prepared() -> tuple[Callable[[Tensor, Tensor], Tensor], Any]:
        model = workloads.mlp_model().to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, cycle([(x.contiguous().to("xla"), y.contiguous().to("xla")) for x, y in workloads.mlp_batches()])

    step, batches = prepared()
    static = tuple(x.clone() for x in next(batches))
    graph, _ = _captured(step, *static)

    def replay() -> None:
        for one, other in zip(static, next(batches), strict=True):
            one.copy_(other)
        graph.replay()

    own, own_batches = prepared()

    def record() -> None:
        import torch_xla

        loss = own(*next(own_batches))
        torch_xla.sync()
        del loss

    return {"replayed": _timed(replay, _wait), "recorded": _timed(record, _wait), "jax": mlp().pipelined}


def _decoder() -> nn.ModuleDict:
    torch.manual_seed(0)
    cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)])
    return nn.ModuleDict({"words": nn.Embedding(WORDS, WIDTH), "cells": cells, "out": nn.Linear(WIDTH, WORDS)})


def _gru(weights: dict[str, jax.Array], name: str, x: jax.Array, h: jax.Array) -> jax.Array:
    given = jnp.split(x @ weights[f"{name}.weight_ih"].T + weights[f"{name}.bias_ih"], 3, -1)
    kept = jnp.split(h @ weights[f"{name}.weight_hh"].T + weights[f"{name}.bias_hh"], 3, -1)
    reset, update = jax.nn.sigmoid(given[0] + kept[0]), jax.nn.sigmoid(given[1] + kept[1])
    return (1 - update) * jnp.tanh(given[2] + reset * kept[2]) + update * h


def _decoder_loops() -> dict[str, Loop]:
    """A token of a small GRU decoder, which chooses the next by itself."""

    def prepared() -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        model = _decoder().to("xla").requires_grad_(False)
        token, *hidden = state = (torch.zeros(1, dtype=torch.long).to("xla"), *torch.zeros(2, 1, WIDTH).to("xla"))

        def step() -> None:
            x = model["words"](token)
            for h, cell in zip(hidden, model["cells"], strict=True):
                h.copy_(cell(x, h))
                x = h
            token.copy_(model["out"](x).argmax(-1))

        return step, state

    step, _ = prepared()
    graph, _ = _captured(step)
    own, _ = prepared()

    def record() -> None:
        import torch_xla

        own()
        torch_xla.sync()

    weights = {name: array(value) for name, value in _decoder().named_parameters()}

    @partial(jax.jit, donate_argnums=0)
    def token(state: tuple[jax.Array, ...], weights: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        x = weights["words.weight"][state[0]]
        hidden = []
        for i in range(2):
            x = _gru(weights, f"cells.{i}", x, state[i + 1])
            hidden.append(x)
        return (x @ weights["out.weight"].T + weights["out.bias"]).argmax(-1), *hidden

    state = [(jnp.zeros(1, dtype=jnp.int32), jnp.zeros((1, WIDTH)), jnp.zeros((1, WIDTH)))]

    def jitted() -> None:
        state[0] = token(state[0], weights)

    by_jax = _timed(jitted, lambda: jax.block_until_ready(state[0]))
    return {"replayed": _timed(graph.replay, _wait), "recorded": _timed(record, _wait), "jax": by_jax}


def figures(name: str, turns: int) -> dict[str, float]:
    """Milliseconds of a turn, and what a replay takes of the jitted step's."""
    loops = _mlp_loops() if name == "mlp" else _decoder_loops()
    for loop in loops.values():
        loop(turns)
    rounds = [{how: loop(turns) for how, loop in loops.items()} for _ in range(ROUNDS)]
    found = {f"{name}_{how}_ms": median(r[how] for r in rounds) * 1e3 for how in loops}
    found[f"{name}_graph_ratio"] = median(r["replayed"] / r["jax"] for r in rounds)
    return found


def both() -> dict[str, float]:
    """Those of a training step and of a decoder's token."""
    return {**figures("mlp", 100), **figures("gru", 500)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(both(), indent=1))
