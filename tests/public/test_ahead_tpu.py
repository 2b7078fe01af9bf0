"""`torch_xla.ahead` with the compiler for TPUs: `make test-ahead`."""

from __future__ import annotations

import importlib.util
import json
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
import torch, torch.nn as nn, torch_xla
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(1), nn.Linear(144, 3)).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = nn.functional.cross_entropy(model(torch.ones(2, 1, 8, 8).to("xla")), torch.ones(2).long().to("xla"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
"""


def test_a_training_step(tmp_path: Path) -> None:
    _, report = run(tmp_path, TRAINING, "v5e:1x1")
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


@pytest.mark.parametrize("name", ["Pallas kernel of JAX's", "int8 weights", "paged attention"])
def test_a_program_of_the_table(name: str) -> None:
    done = python("-m", "benchmarks.tpu_programs", "--here", "--split", "", name, cwd=ROOT, timeout=280)
    assert "| one chip |" in done.stdout and "refused" not in done.stdout, done.stdout


LARGE = """
import torch, torch_xla
with torch.device("xla"):
    scales = torch.nn.ParameterList(torch.ones(16384, dtype=torch.bfloat16) for _ in range(4))
    x = torch.zeros(262144, 16384, dtype=torch.bfloat16)
for scale in scales:
    x = torch.softmax(x * scale, -1)
x.float().mean().backward()
torch_xla.sync()
"""


def test_what_does_not_fit_is_explained(tmp_path: Path) -> None:
    done, report = run(tmp_path, LARGE, "v5e:2x2", check=False)
    assert done.returncode == 1 and "does not fit" in done.stdout and "Traceback" not in done.stderr
    refused = report["programs"][-1]
    assert "15.75G" in refused["refused"]
    kept = [held for held in refused["largest"] if held["kept"]]
    assert (
        kept and kept[0]["shape"] == "bfloat16[262144, 16384]" and kept[0]["line"].endswith("script.py:7 in <module>")
    )
    assert "torch.utils.checkpoint" in done.stdout


JOB = """
import torch, torch_xla, torch.distributed as dist, torch_xla.runtime as xr
from torch.distributed.fsdp import fully_shard
import torch_xla.distributed.xla_backend
def main(index):
    dist.init_process_group("xla", init_method="xla://")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).to("xla")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
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
x = torch.ones(16, 128).to("xla")
xs.mark_sharding(x, mesh, ("data", None))
torch_xla.sync()
print((x * 2).sum().item())
"""
    done, report = run(tmp_path, program, "v5e:2x4", XLA_USE_SPMD="1")
    assert "hosts 2 0 4" in done.stdout and report["processes"] == 2
    (collective,) = report["programs"][-1]["collectives"]
    assert (collective["kind"], collective["axes"]) == ("all-reduce", "data")


def test_the_page_shows_what_comes(tmp_path: Path) -> None:
    page = (ROOT / "docs/ahead.md").read_text()
    program = page.split("```py\n")[1].split("```")[0]
    shown = page.split("--topology v5e:2x4 split.py\n")[1].split("\n\nThe weights")[0]
    (tmp_path / "split.py").write_text(program)
    command = ["-m", "torch_xla.ahead", "--topology", "v5e:2x4", "split.py"]
    done = python(*command, cwd=tmp_path, timeout=280, PJRT_DEVICE="TPU", XLA_USE_SPMD="1")
    said, wanted = (
        re.sub(r"compiled in [\d.]+ s|libtpu [\d.]+, JAX [\d.]+", "", text) for text in (done.stdout, shown)
    )
    assert said.split() == wanted.split()
