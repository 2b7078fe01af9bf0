"""Threads that record, make and drop views, write, read and issue barriers, in a process that forks meanwhile.

    python tests/record/stress.py SECONDS

Every thread has a device, whose graphs are the same again and again: compiling new ones would take all the time. It
checks the values of its own tensors, and reads and writes some that all share. Children record, drop what
they inherited and exit. Prints what was done; the exit status is 1 where something went wrong.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable

import torch

import torch_xla
from torch_xla._core.execute import barrier

THREADS = 3
NEVER = "xla:3"  # no barrier computes what is pending there
PATIENCE = 120  # seconds that a child, or a thread, may take

done: Counter[str] = Counter()
failures: list[str] = []
shared = [torch.zeros(6, 4, device="xla:0") for _ in range(3)]


def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        failures.append(f"{what}: got {got.tolist()}, expected {want.tolist()}")


def dropped(rng: random.Random) -> None:
    """What is recorded and never computed; it does not repeat, or a loop would be found in it and cut."""
    x = torch.zeros(5, 5, device=NEVER)
    kept = []
    for i in range(200):
        rng.choice((x[i % 5].add_, x[i % 5].sub_, x[i % 5].mul_))(1.0)
        x = torch.rand(5, 5, device=NEVER) + x.t()
        kept.append(x[rng.randrange(5)])
        if rng.random() < 0.1:
            kept.clear()


def views(rng: random.Random) -> None:
    """Writes through views of views, of a tensor and of its copy on the host."""
    ours, host = torch.zeros(4, 6, device="xla"), torch.zeros(4, 6)
    for _ in range(rng.randrange(1, 3)):
        row, column, number = rng.randrange(4), rng.randrange(6), float(rng.randrange(5))
        for x in (ours, host):
            x.t()[column].add_(number)
            x.view(2, 12)[row // 2].mul_(2.0)
            x[row, column:].fill_(number)
    check("views", ours.cpu(), host)


def chain(rng: random.Random) -> None:
    """A chain of operators, and tensors that are dropped while it is pending."""
    x = torch.ones(5, device="xla")
    kept = []
    for i in range(10):
        x = x + 1.0
        kept.append(x[i % 5])
        if rng.random() < 0.3:
            kept.clear()
    check("chain", x.cpu(), x.clone().cpu())


def gradients(rng: random.Random) -> None:
    w = torch.full((4, 4), 0.5, device="xla", requires_grad=True)
    x = torch.ones(2, 4, device="xla")
    (x @ w).square().sum().backward()
    assert w.grad is not None
    check("gradients", w.grad.cpu(), torch.full((4, 4), 8.0))


def numbers(rng: random.Random) -> None:
    x = torch.rand(7, device="xla")
    if not 0 <= x[rng.randrange(7)].item() <= 1:
        failures.append("numbers: out of range")


def clones(rng: random.Random) -> None:
    x = torch.arange(4.0).to("xla")
    copies = [x.clone() for _ in range(3)]
    x.add_(1.0)
    cut(rng)
    for each in copies:
        check("clones", each.cpu(), torch.arange(4.0))


def together(rng: random.Random) -> None:
    """What all threads write: reads must give something, and end."""
    x = rng.choice(shared)
    x[rng.randrange(6)].add_(1.0)
    x.cpu()


def cut(rng: random.Random) -> None:
    barrier.sync(torch.xla.current_device(), wait=rng.random() < 0.2)


WORK: list[Callable[[random.Random], None]] = [
    dropped,
    dropped,
    views,
    chain,
    gradients,
    numbers,
    clones,
    together,
    cut,
]


def work(number: int, end: float) -> None:
    rng = random.Random(number)
    try:
        with torch.xla.device(number):
            first = rng.sample(WORK, len(WORK))  # each kind of work once, however little time there is
            while (first or time.monotonic() < end) and not failures:
                task = first.pop() if first else rng.choice(WORK)
                task(rng)
                done[task.__name__] += 1
    except BaseException:
        failures.append(traceback.format_exc())


def child(kept: list[torch.Tensor]) -> None:
    faulthandler.dump_traceback_later(PATIENCE / 2)
    del kept[:]
    x = torch.zeros(3, 3, device="xla")
    x[1].add_(1.0)
    y = torch.rand(3, device="xla") + x[:, 1]
    del x, y
    try:
        torch.ones(2, device="xla").cpu()
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 3)
    os._exit(4)


def fork() -> None:
    kept = [torch.ones(3, device="xla") + 1.0 for _ in range(10)]
    pid = os.fork()
    if pid == 0:
        try:
            child(kept)
        finally:
            os._exit(5)
    end = time.monotonic() + PATIENCE
    while (finished := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            failures.append("a child hangs")
            return
        time.sleep(0.01)
    if finished[1] != 0:
        failures.append(f"a child ended with status {finished[1]}")
    done["fork"] += 1


def main(seconds: float) -> int:
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-5)  # every operator gives the GIL up, and would wait 5 ms to get it back
    for task in WORK:  # the client starts in one thread, and most programs are compiled
        task(random.Random(0))
    gc.freeze()  # what a fork copies for nothing
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=work, args=(i, end), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end and not failures:
        fork()
        time.sleep(0.5)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    torch_xla.sync(wait=True)
    print(*failures, dict(done), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
