"""`torch_xla.ahead` with the compiler for TPUs: `make test-ahead`."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from probes import ROOT, python

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the compiler is package libtpu"),
    pytest.mark.slow,
]


def run(folder: Path, program: str, topology: str, *arguments: str, check: bool = True, **env: str) -> tuple[Any, Any]:
    script, report = folder / "script.py", folder / "report.json"
    script.write_text(program)
    report.unlink(missing_ok=True)
    command = ["-m", "torch_xla.ahead", "--topology", topology, "--json", report, script, *arguments]
    done = python(*command, cwd=folder, check=check, timeout=280, PJRT_DEVICE="TPU", **env)
    return done, json.loads(report.read_text()) if report.exists() else None


TRAINING = """
import signal, torch, torch.nn as nn, torch_xla
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(1), nn.Linear(144, 3)).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = nn.functional.cross_entropy(model(torch.ones(2, 1, 8, 8).to("xla")), torch.ones(2).long().to("xla"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    signal.signal(signal.SIGPROF, signal.getsignal(signal.SIGPROF))  # as Lightning does after a fit
    signal.raise_signal(signal.SIGPROF)  # as timers of libtpu's do
"""


def test_a_training_step_beside_another_process(tmp_path: Path) -> None:
    """One that has libtpu's lock file, as a process with chips does; the file stays as it was."""
    lock = Path("/tmp/libtpu_lockfile")
    was_there = lock.exists()
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = set(os.listdir("/tmp"))
        _, report = run(tmp_path, TRAINING, "v5e:1x1")
        assert not {name for name in set(os.listdir("/tmp")) - before if "libtpu" in name}
    if not was_there:
        lock.unlink()
    step = report["programs"][-1]
    assert step["fits"] and step["memory"]["arguments"] > 4 * 3 * 500 and report["chips"] == 1
    assert 0 < step["bounds"]["products"] < step["bounds"]["memory"] < 1e-3


def test_what_is_known_of_chips_is_what_the_compiler_says() -> None:
    """A program that needs more than any chip has is refused with the chip's memory."""
    program = """
import jax, jax.numpy as jnp, os, re, sys
from torch_xla._core.device import chips, described
for chip in chips.CHIPS:
    os.environ["XLA_AHEAD"] = f"{chip.name}:{'2x2' + 'x1' * (chip.dimensions - 2)}"
    described.devices.cache_clear()
    devices = described.devices()
    much = jax.ShapeDtypeStruct((300, 1 << 30), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    try:
        jax.jit(lambda x: x + 1).lower(much).compile()
    except jax.errors.JaxRuntimeError as error:
        said = float(re.search(r"HBM \\(([\\d.]+)G\\)", str(error))[1])
        print(chip.name, len(devices), chip.memory / chips.GIB == said)
"""
    done = python("-c", program, JAX_PLATFORMS="cpu")
    assert done.stdout.splitlines() == [
        f"{name} {8 if name == 'v7x' else 4} True" for name in "v4 v5e v5p v6e v7x".split()
    ]


def test_a_slice_that_there_is_not_is_one_line(tmp_path: Path) -> None:
    done, report = run(tmp_path, TRAINING, "v5e:3x5", check=False)
    assert done.returncode == 2 and report is None and done.stderr.count("\n") == 1
    assert done.stderr.startswith("[ahead] got topology 'v5e:3x5', which libtpu does not know")


@pytest.mark.parametrize("name", ["Pallas kernel of JAX's", "int8 weights", "paged attention"])
def test_a_program_of_the_table(name: str) -> None:
    done = python("-m", "benchmarks.tpu_programs", "--here", "--split", "", name, cwd=ROOT, timeout=280)
    assert "| one chip |" in done.stdout and "refused" not in done.stdout, done.stdout


JOB = """
import torch, torch_xla, torch.distributed as dist, torch_xla.runtime as xr, torch_xla.distributed.xla_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
def main(index):
    dist.init_process_group("xla", init_method="xla://")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).to("xla")
    mesh = init_device_mesh("xla", (8,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(8, 256).to("xla")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    print("hosts", xr.host_index(), xr.world_size(), xr.local_process_count())
if __name__ == "__main__":
    torch_xla.launch(main)
"""


def test_a_job_over_a_slice(tmp_path: Path) -> None:
    done, report = run(tmp_path, JOB, "v5e:2x4")
    assert "hosts 0 8 4" in done.stdout
    kinds = {c["kind"] for p in report["programs"] for c in p["collectives"] if c["group"] == 8}
    assert "all-gather" in kinds and report["fits"]


def test_with_spmd_a_process_is_a_host(tmp_path: Path) -> None:
    program = """
import numpy as np, torch, torch_xla, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
print("hosts", xr.process_count(), xr.process_index(), xr.addressable_runtime_device_count())
mesh = xs.Mesh(np.arange(8), (8,), ("data",))
x = xs.mark_sharding(torch.ones(1024, 1024).to("xla"), mesh, ("data", None))  # more than the host would compute
torch_xla.sync()
print((x * 2).sum().item())
"""
    done, report = run(tmp_path, program, "v5e:2x4", XLA_USE_SPMD="1")
    assert "hosts 2 0 4" in done.stdout and report["processes"] == 2
    (collective,) = report["programs"][-1]["collectives"]
    assert (collective["kind"], collective["axes"]) == ("all-reduce", "data")


PAGE = (ROOT / "docs/ahead.md").read_text()
SHOWN = re.findall(
    r"\$ (\S+=\S+ )?python -m torch_xla.ahead --topology (\S+) (\w+\.py)\n(.*?)\n\n(?=\S)", PAGE, re.DOTALL
)


@pytest.mark.parametrize("shown", SHOWN, ids=[name for _, _, name, _ in SHOWN])
def test_the_page_shows_what_comes(tmp_path: Path, shown: tuple[str, str, str, str]) -> None:
    variables, topology, name, expected = shown
    program = re.search(rf"`{name}`.*?```py\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    (tmp_path / name).write_text(program[1])
    env = dict(variable.split("=") for variable in variables.split())
    command = ["-m", "torch_xla.ahead", "--topology", topology, name]
    done = python(*command, cwd=tmp_path, check=False, timeout=280, PJRT_DEVICE="TPU", **env)
    assert done.returncode == ("does not fit" in expected), done.stderr
    varies = r"compiled in [\d.]+ s|libtpu [\d.]+, JAX [\d.]+|graph [0-9a-f]{32}"
    said, wanted = (re.sub(varies, "", text) for text in (done.stdout, expected))
    number = r"(\d[\d.,]*(?:e[+-]\d+)?)"
    said, wanted = (re.split(number, " ".join(text.split())) for text in (said, wanted))
    assert said[::2] == wanted[::2]
    for one, other in zip(said[1::2], wanted[1::2], strict=True):  # sizes of code and packed numbers vary a little
        assert float(one.strip(".,").replace(",", "")) == pytest.approx(
            float(other.strip(".,").replace(",", "")), rel=0.1
        )


def test_the_page_shows_three() -> None:
    assert [name for _, _, name, _ in SHOWN] == ["train.py", "split.py", "deep.py"]
