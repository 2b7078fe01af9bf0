"""What is printed while the processes of a job connect."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from probes import python

from torch_xla._core.job import store


def test_only_gloo_is_kept_back() -> None:
    source, sink = os.pipe()
    saved = os.dup(1)
    os.dup2(sink, 1)
    try:
        with store._silent():
            os.write(1, b"a line of another thread\n[Gloo] Rank 0 is connected\nthe next")
        os.write(1, b" line")
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)
    with os.fdopen(source, "rb") as result:
        assert result.read() == b"a line of another thread\nthe next line"


@pytest.mark.costs("processes of a job, which start and compile each for itself")
def test_a_loop_that_stays_whole_is_told_of_while_it_grows(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, torch, torch_xla, torch_xla.core.xla_model as xm
def steps(index):
    x = torch.ones(4, device="xla")
    for _ in range(200):
        x = xm.all_reduce("sum", (x * 0.5 + 1) * (x - 1))
        x = xm.all_reduce("max", x.tanh())
    os._exit(0)  # before it runs
if __name__ == "__main__":
    torch_xla.launch(steps)
""")
    err = python(script, devices=2, imported=True, XLA_NOTICES="all", XLA_COLLECTIVE_TIMEOUT="60").stderr
    told = re.findall(r"(\d+) operators were recorded without a barrier, in a loop at (.*?) whose \d+ operators", err)
    assert "put torch_xla.sync() at the end of its body" in err
    assert {line for _, line in told} <= {f"{script}:6 in steps", f"{script}:7 in steps"}
    assert {count for count, _ in told} == {"512", "1250"}, err


@pytest.mark.costs("processes of a job")
def test_a_process_that_is_ended_says_why_and_where_and_a_pool_nothing(tmp_path: Path) -> None:
    """Both are ended by SIGTERM: the first as another one has failed, a pool's workers as nothing is left to do."""
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing, time, torch_xla, torch_xla.core.xla_model as xm
def work(index):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    xm.rendezvous("start")
    assert index == 0, "bad sample"
    time.sleep(60)
if __name__ == "__main__":
    torch_xla.launch(work)
""")
    err = python(script, devices=2, imported=True, check=False).stderr
    assert err.count("Stack") == 1
    assert re.search(r'\[job\] rank 0 was sent SIGTERM.*:\nStack .*:\n  File ".*", line 8 in work', err), err
