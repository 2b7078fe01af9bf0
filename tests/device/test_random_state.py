"""The device's random state goes with PyTorch's: seeded, forked and restored, it repeats where the CPU's does."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable

import torch

import torch_xla  # noqa: F401

Drawn = tuple[int, ...]


def on_cpu() -> Drawn:
    return tuple(torch.randint(2**62, (2,)).tolist())


def on_xla(device: str = "xla") -> Drawn:
    """The state that a draw takes, without computing it."""
    state = tuple(torch.xla.get_rng_state(device).tolist())
    torch.rand(1, device=device)
    return state


def in_a_thread(draw: Callable[[], Drawn]) -> Drawn:
    drawn: list[Drawn] = []
    thread = threading.Thread(target=lambda: drawn.append(draw()))
    thread.start()
    thread.join()
    return drawn[0]


def draws(program: list[tuple[str, int]], draw: Callable[[], Drawn]) -> list[int]:
    """Runs a program; for each of its draws, which one is the first that gave the same."""
    saved: dict[int, torch.Tensor] = {}
    forks: list[contextlib.ExitStack] = []
    drawn: list[Drawn] = []
    with torch.random.fork_rng():
        torch.manual_seed(99)
        for what, number in program:
            if what == "draw":
                drawn.append(draw())
            elif what == "thread":
                drawn.append(in_a_thread(draw))
            elif what == "seed":
                torch.manual_seed(number)
            elif what == "save":
                saved[number] = torch.get_rng_state()
            elif what == "restore" and number in saved:
                torch.set_rng_state(saved[number])
            elif what == "fork":
                forks.append(contextlib.ExitStack())
                forks[-1].enter_context(torch.random.fork_rng())
            elif what == "leave" and forks:
                forks.pop().close()
        while forks:
            forks.pop().close()
    return [drawn.index(d) for d in drawn]


def test_draws_repeat_where_those_of_the_cpu_do():
    choose = random.Random(0)
    kinds = ["draw"] * 6 + ["thread", "seed", "save", "restore", "fork", "leave"]
    for _ in range(200):
        program = [(choose.choice(kinds), choose.randrange(3)) for _ in range(40)]
        assert draws(program, on_xla) == draws(program, on_cpu), program


def test_a_fork_with_another_seed_repeats_nothing():
    torch.manual_seed(0)
    first = torch.randn(3, device="xla")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.randn(3, device="xla")
    assert not torch.equal(torch.randn(3, device="xla").cpu(), first.cpu())


def test_each_device_counts_its_own_draws():
    torch.manual_seed(5)
    states = [on_xla("xla:1"), on_xla("xla:1")]
    state = torch.get_rng_state()
    assert on_xla("xla:0") == states[0]
    states.append(on_xla("xla:1"))
    torch.set_rng_state(state)
    torch.manual_seed(5)
    assert [on_xla("xla:1") for _ in range(3)] == states


def test_a_state_of_its_own_stays_until_the_next_seed():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    torch.xla.manual_seed(6)
    own = [on_xla(), on_xla()]
    torch.xla.manual_seed(6)
    torch.randn(1, device="xla:1")
    assert on_xla() == own[0]
    torch.set_rng_state(state)
    torch.manual_seed(5)
    assert on_xla() not in own


def test_draws_leave_those_of_the_cpu_as_they_are():
    torch.manual_seed(3)
    expected = [torch.randn(17), torch.randn(3), torch.rand(2), torch.randn(1)]
    torch.manual_seed(3)
    for e in expected:
        torch.randn(2, device="xla")
        assert torch.equal(torch.randn(e.shape) if e is not expected[2] else torch.rand(2), e)
