"""Random programs of `hot_programs` with what may come between: ways of running, interrupts, failures, forks, settings.

A process of its own runs some of them and compares with the CPU, where only the settings change:
`python mixed_programs.py way,fork first last [threads]`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import hot_programs
import torch
from torch import Tensor

import torch_xla
from torch_xla import _config
from torch_xla.ops import registry

LIBRARY = torch.library.Library("mixed", "DEF")
LIBRARY.define("fail(Tensor x) -> Tensor")
LIBRARY.impl("fail", torch.empty_like, "Meta")
KINDS = ("way", "interrupt", "failure", "fork", "settings", "allocation")


def fail(*args: Any) -> Any:
    """What the operator's rule and kernel do."""
    raise ValueError("as planned")


LIBRARY.impl("fail", fail, "CPU")
registry._RULES["mixed.fail.default"] = fail


class Mixed:
    """What one program meets; `kinds` says of which kinds.

    Attributes:
        met: How often each kind came.
    """

    def __init__(self, device: str, seed: int, kinds: tuple[str, ...] = KINDS, often: float = 0.4) -> None:
        self.on_xla = device != "cpu"
        self.draw = random.Random(-seed - 1)
        self.kinds = kinds
        self.often = often
        self.met = dict.fromkeys(KINDS, 0)
        # Work that is still under way when the host has gone on, with integers whose quotients have the default dtype.
        self.weight = (torch.arange(40_000.0).view(200, 200).sin() / 10).to(device)
        self.large = [torch.eye(200).to(device), torch.arange(40_000).view(200, 200).to(device)]
        self.remainders: list[Tensor] = []

    def barrier(self) -> None:
        """A barrier, with what comes before and in it; the CPU draws the same."""
        for _ in range(5):
            self.large[0] = torch.tanh(self.large[0] @ self.weight)
        self.remainders.append(((self.large[1] / 7).double() * 7 - self.large[1]).flatten()[:100] * 1e6)
        self.large[1] = (self.large[1] / 7 * 5 + 0.07 + self.large[0] / 100).long()  # never near an integer
        kind = self.draw.choice(self.kinds) if self.draw.random() < self.often else ""
        how, wait = self.draw.random(), self.draw.random() < 0.3
        if kind:
            self.met[kind] += 1
        if not self.on_xla:
            if kind == "settings":
                self._set(how)
            return
        if kind == "way":
            _config.XLA_HOST_COMPUTE.set(None if how < 0.4 else "never")
        elif kind == "fork":
            self._fork()
        elif kind == "failure":
            self._fail()
        elif kind == "interrupt":
            self._interrupted(how * 0.004)
        elif kind == "allocation":
            torch.empty(1000, device="xla")  # never computed
        torch_xla.sync(wait=wait)
        if kind == "settings":  # while it runs
            self._set(how)

    def _set(self, how: float) -> None:
        if how < 0.5:
            torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)
        elif how < 0.75:
            torch.set_float32_matmul_precision("high" if how < 0.6 else "highest")
        else:
            torch.use_deterministic_algorithms(how < 0.9)

    def _fork(self) -> None:
        pid = os.fork()
        if not pid:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    def _fail(self) -> None:
        lost = torch.ops.mixed.fail(torch.ones(5).to("xla") + 1)
        try:
            torch_xla.sync(wait=True)
        except RuntimeError as error:
            assert "as planned" in str(error), error
        else:
            raise AssertionError("a failure was not told")
        del lost

    def _interrupted(self, after: float) -> None:
        """A barrier in which Ctrl-C comes, or around which."""
        came = False
        main = threading.main_thread().ident
        assert main is not None and threading.get_ident() == main

        def press() -> None:
            time.sleep(after)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=press)
        try:
            thread.start()
            torch_xla.sync(wait=True)
            thread.join()
            for _ in range(1000):  # the handler runs between two instructions
                time.sleep(0.001)
        except KeyboardInterrupt:
            came = True
        thread.join()
        assert came, "an interrupt was lost"


def around(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Runs a program and puts back what it set."""
    before = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        with _config.variables_kept("XLA_HOST_COMPUTE"):
            return work()
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.use_deterministic_algorithms(before[2])


def run(device: str, seed: int, kinds: tuple[str, ...], turns: int) -> tuple[list[Tensor], dict[str, int]]:
    """What a program read and left behind, and how often something of each kind came."""
    met = Mixed(device, seed, kinds)

    def work() -> list[Tensor]:
        result = hot_programs.run(device, seed, turns=turns, barrier=met.barrier)
        return [*result, *(x.cpu() for x in (*met.large, *met.remainders))]

    return around(work), met.met


def compare(seed: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """Raises where a program's values are not the CPU's."""
    turns = 1 + seed % 3  # in the second and third some graphs repeat, and are compiled
    ours, met = run("xla", seed, kinds, turns)
    theirs, _ = run("cpu", seed, kinds, turns)
    assert len(ours) == len(theirs), f"seed {seed}"
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda text: f"seed {seed}: {text}"
        )
    return met


def in_threads(first: int, count: int, threads: int) -> tuple[list[threading.Thread], list[BaseException]]:
    """Threads that have begun to run programs of their own, and what they raised."""
    failed: list[BaseException] = []

    def work(begin: int) -> None:
        try:
            for seed in range(begin, begin + count):
                compare(seed, ("allocation",))
        except BaseException as error:
            failed.append(error)

    made = [threading.Thread(target=work, args=(first + 1_000_000 * (n + 1),)) for n in range(threads)]
    for thread in made:
        thread.start()
    return made, failed


if __name__ == "__main__":
    _kinds = tuple(sys.argv[1].split(","))
    _first, _last = int(sys.argv[2]), int(sys.argv[3])
    _threads, _failed = in_threads(_first, _last - _first, int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    _met = dict.fromkeys(KINDS, 0)
    for _seed in range(_first, _last):
        for _kind, _times in compare(_seed, _kinds).items():
            _met[_kind] += _times
    for _thread in _threads:
        _thread.join()
    if _failed:
        raise _failed[0]
    print({name: times for name, times in _met.items() if times})
