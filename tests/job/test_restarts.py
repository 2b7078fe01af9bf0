"""torchrun starts jobs anew: what the last try left in its store is no part of the next, and no orphans stay behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from probes import python, start
from test_faults import running, wait_until_gone

from torch_xla._core.job import store, tries

TORCHRUN = ("-m", "torch.distributed.run")

FAILING = """
import os, signal, sys, time, torch, torch_xla, torch.distributed as dist
import torch_xla.distributed.xla_backend
dist.init_process_group(sys.argv[1])
rank, world, count = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
on_host, x = dist.new_group(backend="gloo"), torch.ones(3, device="xla")
counted = torch.tensor([float(count)], device="xla")
dist.all_reduce(counted, op=dist.ReduceOp.MAX)
dist.all_reduce(x)
y = x.cpu()
dist.all_reduce(y, group=on_host)
if count < int(sys.argv[2]) and rank == world - 1:
    if count == 0:
        raise ValueError("bad sample")
    os.kill(os.getpid(), (signal.SIGKILL, signal.SIGTERM)[count % 2])
if counted.item() < int(sys.argv[2]):
    time.sleep(float(sys.argv[3]))  # its launcher must not see that it has finished
sys.stdout.write(f"{count} of {rank}: {x.tolist()}, {y.tolist()}\\n")
"""


def ended(output: str) -> set[tuple[int, str]]:
    """The restarts that the host of each rank had counted when that finished, and what it had."""
    return {(int(rank), text) for rank, text in re.findall(r"\d of (\d): (.*)", output)}


def expected(world: int) -> set[tuple[int, str]]:
    return {(rank, f"{[float(world)] * 3}, {[float(world**2)] * 3}") for rank in range(world)}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("backend", ["xla", "cpu:gloo,xla:xla"])
def test_a_job_that_is_started_anew(tmp_path: Path, processes: int, backend: str) -> None:
    (tmp_path / "job.py").write_text(FAILING)
    options = ("--standalone", "--nproc-per-node", str(processes), "--max-restarts=3")
    done = python(*TORCHRUN, *options, tmp_path / "job.py", backend, "3", "0", devices=1, timeout=280, imported=True)
    assert ended(done.stdout) == expected(processes)


@pytest.mark.slow
def test_hosts_that_count_restarts_by_themselves(tmp_path: Path) -> None:
    """Two agents stand for two hosts: that whose worker fails counts it, the other does not."""
    (tmp_path / "job.py").write_text(FAILING)
    with_port = store.listen("127.0.0.1", 0).port
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=one"]
    options += [f"--rdzv-endpoint=localhost:{with_port}", str(tmp_path / "job.py"), "xla", "2", "600"]
    both = [start(*TORCHRUN, *options, devices=1, imported=True) for _ in range(2)]
    outputs = [agent.communicate(timeout=280) for agent in both]
    assert ended("".join(output for output, _ in outputs)) == expected(2), outputs
    assert sorted(re.findall(r"(\d) of", "".join(output for output, _ in outputs))) == ["0", "2"]


class NewProcess(Counter[str]):
    """Counts nothing, as many processes stand for one here."""

    def __setitem__(self, key: str, value: int) -> None:
        pass


def test_a_try_has_a_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in its processes, whatever those of the last one asked and did not hear."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("XLA_JOB_TRY", raising=False)
    monkeypatch.setattr(tries, "_agreements", NewProcess())
    server = store.listen("127.0.0.1", 0)
    world = 3

    def one_try(number: int) -> set[str]:
        names: list[str] = []

        def rank(rank: int) -> None:
            names.append(tries.name_of_try(server.clone(), rank, world, "test"))

        server.set("torch_xla/test/0/asks/1", f"asked by a process of try {number} that was killed")
        threads = [threading.Thread(target=rank, args=(i,)) for i in range(world)]
        for thread in threads:
            thread.start()
            time.sleep(0.05 * number)
        for thread in threads:
            thread.join()
        assert len(names) == world
        return set(names)

    first, second = one_try(0), one_try(1)
    assert len(first) == len(second) == 1 and first != second


WAITING = """
import sys, time, torch, torch_xla, torch.distributed as dist
import torch_xla.distributed.xla_backend
dist.init_process_group("xla")
x = torch.ones(3, device="xla")
dist.all_reduce(x)
assert x.tolist() == [2.0] * 3
sys.stdout.write("started\\n")
sys.stdout.flush()
while dist.get_rank() == 1:
    time.sleep(600)  # by itself: it waits for nobody
dist.all_reduce(x)
x.tolist()
"""


def test_processes_end_with_torchrun(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAITING)
    options = ("--standalone", "--nproc-per-node", "2", tmp_path / "job.py")
    agent = start(*TORCHRUN, *options, devices=1, imported=True, JOB_TEST=str(tmp_path))
    try:
        assert agent.stdout is not None and [agent.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        workers = [pid for pid in running(f"JOB_TEST={tmp_path}") if pid != agent.pid]
        began = time.monotonic()
        os.kill(agent.pid, signal.SIGKILL)
        _, errors = agent.communicate(timeout=60)
        wait_until_gone(f"JOB_TEST={tmp_path}")
        assert time.monotonic() - began < 10 and len(workers) >= 2
    finally:
        for pid in running(f"JOB_TEST={tmp_path}"):
            os.kill(pid, signal.SIGKILL)
    for rank in (0, 1):
        told = rf"\[job\] whoever started the processes, .* has ended, and with it rank {rank}, .*job\.py:\d+"
        assert re.search(told, errors), errors
