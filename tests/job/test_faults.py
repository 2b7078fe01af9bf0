"""Processes that differ or die: each ends in time and says who, where and what for; nothing is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import faults
import pytest
from probes import ROOT, python, start

WITHIN = 20.0  # seconds
SCRIPT = ROOT / "tests" / "job" / "faults.py"


def observed(folder: Path, processes: int, *names: str, **env: str) -> tuple[dict[str, faults.Seen], str]:
    file = folder / "seen.json"
    options = ("--processes", str(processes), "--json", file)
    done = python(SCRIPT, *names, *options, devices=4, timeout=280, imported=True, JOB_TEST=str(folder), **env)
    result = json.loads(file.read_text())
    seen = {
        name: faults.Seen(
            **{**by[str(processes)], "ranks": {int(r): tuple(v) for r, v in by[str(processes)]["ranks"].items()}}
        )
        for name, by in result.items()
    }
    return seen, done.stdout + done.stderr


def running(mark: str) -> dict[int, str]:
    """Command lines of processes that were started with this in their environment, but for this one."""
    results = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                results[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return results


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + 10
    while (left := running(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.sweep)])
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"faults{request.param}")
    return (*observed(folder, request.param), request.param, folder)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_all_end_and_say_why(job, name):
    seen, _, processes, _ = job
    fault, result = faults.FAULTS[name], seen[name]
    assert result.seconds < WITHIN
    assert bool(re.search(fault.raised, result.launcher, re.DOTALL)) and (fault.raised != "" or result.launcher == "")
    told = result.told()
    assert bool(told) is fault.noticed
    for text in told:
        assert re.search(fault.told, text), text
    if not fault.noticed:
        assert [text for text, _ in result.ranks.values()] == [""] * processes


@pytest.mark.costs("processes of a job, which start and compile each for itself")
def test_four_that_wait_for_each_other_answer_each_other(tmp_path):
    """Each asks all where they are, at one time."""
    seen, _ = observed(tmp_path, 4, "mixed")
    assert seen["mixed"].seconds < WITHIN
    told = seen["mixed"].told()
    assert len(told) == 4 and all(re.search(faults.FAULTS["mixed"].told, text) for text in told), told


SPANNING = {
    "raises": r"rank 1 has ended \(ValueError: bad sample\) while rank 0 was in all_reduce\(sum\) of float32.*_sum$",
    "killed": r"rank 1 has ended \(it was (killed|ended by SIGKILL)\) while rank 0 was in all_reduce\(sum\).*_sum$",
    "never": r"rank 0 waited \d+ s in all_reduce\(sum\) of float32\[4\].* for rank 1, which is at .*never",
    "known": r"differ in what they do together: .*all_reduce\((sum|max)\) of .*, rank \d runs all_reduce\((max|sum)\)",
}


@pytest.mark.own_client("a plugin for CPUs knows its own process only")
@pytest.mark.parametrize("names", [list(SPANNING), pytest.param(list(faults.FAULTS), marks=pytest.mark.sweep)], ids=len)
@pytest.mark.costs("processes of a job, which start and compile each for itself")
def test_in_programs_that_span_the_job(tmp_path, names):
    """Where nothing can be asked of a collective: a process that is stuck in one for ever is ended, and says why."""
    seen, output = observed(tmp_path, 2, *names, XLA_CPU_COLLECTIVES="xla")
    for name in names:
        told = "\n".join([seen[name].launcher, *seen[name].told()])
        assert seen[name].seconds < WITHIN
        assert re.search(SPANNING.get(name, faults.FAULTS[name].raised and "rank 1|bad sample|no data"), told, re.M), (
            told
        )
    check_nothing_is_left(tmp_path, output)


def check_nothing_is_left(folder: Path, output: str) -> None:
    wait_until_gone(f"JOB_TEST={folder}")
    signs = ("terminate called", "Aborted", "Check failure", "frame #0", "leaked", "Segmentation", "GLHF", "INTERNAL:")
    for sign in signs:
        assert sign not in output


def test_nothing_is_left(job):
    _, output, _, folder = job
    check_nothing_is_left(folder, output)
    assert re.search(r"rank 0 has waited \d+ s in all_reduce.* for rank 1, which is at .*in late", output)
    assert re.search(r"rank 0 ends because of another, and was here: Traceback.*(\n  .*)* in no_rendezvous", output)


SLEEPERS = """
import signal, sys, time, torch, torch_xla, torch_xla.core.xla_model as xm
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever runs the tests ignores it
def main(index):
    xm.rendezvous("start")
    if index == 1:
        print("started", flush=True)
        time.sleep(600)
    xm.all_reduce("sum", torch.ones(2, device="xla"))
    torch_xla.sync(wait=True)
if __name__ == "__main__":
    torch_xla.launch(main)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.costs("processes of a job, which start and compile each for itself")
def test_the_processes_end_with_their_launcher(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SLEEPERS)
    mark = f"JOB_TEST={tmp_path}"
    launcher = start(script, devices=2, imported=True, JOB_TEST=str(tmp_path))
    try:
        assert launcher.stdout is not None and launcher.stdout.readline() == "started\n"
        assert running(mark)
        began = time.monotonic()
        os.kill(launcher.pid, how)
        launcher.communicate(timeout=WITHIN)
        assert launcher.returncode != 0
        wait_until_gone(mark)
        assert time.monotonic() - began < 10
    finally:
        launcher.kill()
        for process in running(mark):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_launcher(tmp_path, victim):
    """Two processes that were started by hand; rank 0 has the store."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, sys, torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
xm.rendezvous("start")
if xr.global_ordinal() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
xm.all_reduce("sum", torch.ones(2, device="xla"))
torch_xla.sync(wait=True)
""")
    from torch_xla._core.job import store

    port = store.listen("127.0.0.1", 0).port
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    both = [start(script, str(victim), devices=1, imported=True, **env, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    texts = [process.communicate(timeout=60)[1] for process in both]
    assert both[victim].returncode == -signal.SIGKILL and both[1 - victim].returncode == 1
    lines = texts[1 - victim].strip().splitlines()
    signs = ("JobError: [job] rank", "script.py:", f"rank {victim} has ended")
    assert signs[0] in lines[-1] and any(all(sign in line for sign in signs) for line in lines), "\n".join(lines)
