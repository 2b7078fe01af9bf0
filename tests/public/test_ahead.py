"""`torch_xla.ahead` on described CPU devices, for which JAX's own compiler compiles: no libtpu is needed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from probes import PACKAGE, python

from torch_xla.debug._ahead import hlo

STEP = """
import torch, torch_xla
model = torch.nn.Linear(64, 64, device="xla")
optimizer = torch.optim.AdamW(model.parameters())
torch_xla.sync()
"""
LOOP = """
x = torch.ones(8, 64).to("xla")
def step():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return loss
"""


HERE = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "JAX_NUM_CPU_DEVICES": "1"}


def run(folder: Path, program: str, *options: str, topology: str = "cpu:4", **env: str) -> tuple[Any, Any]:
    """Runs a script under the command; the process, and the report if there is one."""
    script, report = folder / "script.py", folder / "report.json"
    script.write_text(program)
    report.unlink(missing_ok=True)
    command = ["-m", "torch_xla.ahead", "--topology", topology, "--json", report, *options, script]
    done = python(*command, cwd=folder, check=False, imported=True, **HERE | env)
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.costs("a process that imports all anew")
def test_a_script_runs_to_its_end_and_nothing_is_computed(tmp_path: Path) -> None:
    program = f"{STEP}{LOOP}" + "for i in range(4):\n    print('loss', step().item())\nprint('end')\n"
    done, report = run(tmp_path, program)
    assert done.returncode == 0 and done.stdout.count("loss 0.0") == 4 and "\nend\n" in done.stdout, done.stderr
    assert [p["runs"] for p in report["programs"]] == [1, 4], report["programs"]
    step = report["programs"][1]
    assert step["line"].endswith("script.py:13 in step") and step["memory"]["arguments"] >= 3 * 64 * 64 * 4
    assert step["flops"] == 2 * (2 * 8 * 64 * 64) and step["fits"]
    assert list(report["reads"].values()) == [4] and not report["ended"]


@pytest.mark.costs("a process that imports all anew")
def test_a_loop_that_waits_for_a_value_ends_and_cleans_up(tmp_path: Path) -> None:
    program = f"{STEP}{LOOP}" + "try:\n    while not step() > 1:\n        pass\nfinally:\n    print('cleaned up')\n"
    done, report = run(tmp_path, program)
    assert done.returncode == 0 and "cleaned up" in done.stdout, done.stderr
    assert 8 <= report["barriers"] <= 10 and "without a new program" in report["ended"]
    done, report = run(tmp_path, program, "--barriers", "3")
    assert report["barriers"] == 3
    done, report = run(tmp_path, f"{STEP}\nx = model.bias.sum()\nwhile not x.item():\n    pass\n")
    assert done.returncode == 0 and "were read in a row" in report["ended"]


@pytest.mark.costs("a process that imports all anew")
def test_files_keep_what_they_had(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("of yesterday")
    program = f"{STEP}{LOOP}" + "step()\ntorch.save(model.state_dict(), 'model.pt')\n"
    program += "import pickle\nassert pickle.loads(pickle.dumps(torch.ones(2))).sum() == 2\n"
    done, report = run(tmp_path, program)
    assert done.returncode == 0 and (tmp_path / "model.pt").read_text() == "of yesterday"
    assert [re.sub(r"/.*/", "", what) for what in report["unwritten"]] == ["torch.save at script.py:16 in <module>"]
    run(tmp_path, program, "--write")
    assert (tmp_path / "model.pt").stat().st_size > 64 * 64 * 4


JOB = """
import sys, torch, torch_xla, torch.distributed as dist, torch_xla.runtime as xr
import torch_xla.distributed.xla_backend
def main(index):
    dist.init_process_group("xla", init_method=sys.argv[1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).to("xla"))
    given = [None] * dist.get_world_size()
    dist.all_gather_object(given, {"rank": dist.get_rank()})
    print("given", given == [{"rank": index}] * 4, index, xr.world_size())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(8, 64).to("xla")).sum().backward()
        optimizer.step()
        torch_xla.sync()
if __name__ == "__main__":
    torch_xla.launch(main)
"""


@pytest.mark.costs("a process that imports all anew")
@pytest.mark.parametrize("method", ["xla://", "env://"])
def test_a_job_is_one_of_its_processes(tmp_path: Path, method: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    report = tmp_path / "report.json"
    listening = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # where nobody could listen
    options = ["--topology", "cpu:4", "--rank", "2", "--json", report]
    done = python("-m", "torch_xla.ahead", *options, script, method, cwd=tmp_path, imported=True, **HERE | listening)
    assert "given True 2 4" in done.stdout
    found = json.loads(report.read_text())
    assert (found["processes"], found["rank"]) == (4, 2)
    step = found["programs"][-1]
    assert {(c["kind"], c["group"]) for c in step["collectives"]} == {("all-reduce", 4)}
    assert sum(c["nbytes"] for c in step["collectives"]) == (64 * 64 + 64) * 4
    assert step["theory"] == {"parameters and gradients": {"all-reduce": (64 * 64 + 64) * 4}}


MESH = """
import numpy as np, torch, torch_xla, torch_xla.distributed.spmd as xs, torch_xla.runtime as xr
xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (4, 2), ("fsdp", "tensor"))
up, down = (torch.nn.Parameter(torch.ones(*shape, device="xla")) for shape in ((64, 128), (128, 64)))
xs.mark_sharding(up, mesh, ("tensor", "fsdp"))
xs.mark_sharding(down, mesh, ("fsdp", "tensor"))
optimizer = torch.optim.SGD([up, down], 0.1)
for _ in range(3):
    x = torch.ones(16, 128).to("xla")
    xs.mark_sharding(x, mesh, ("fsdp", None))
    linear = torch.nn.functional.linear
    linear(linear(x, up).tanh(), down).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
"""


@pytest.mark.costs("a process that imports all anew")
def test_a_mesh_is_told_by_the_names_of_its_axes(tmp_path: Path) -> None:
    done, report = run(tmp_path, MESH, "--html", str(tmp_path / "page.html"), topology="cpu:8")
    assert done.returncode == 0, done.stderr
    step = report["programs"][-1]
    part = 64 * 128 * 4 // 8
    assert step["theory"] == {
        "parameters and gradients": {"all-gather": 2 * 2 * 4 * part, "reduce-scatter": 2 * part},
        "products of split weights": {"all-reduce": 16 // 4 * 128 * 4},  # of the second; the first's input needs none
    }
    page = (tmp_path / "page.html").read_text()
    assert page.count("<canvas") == len(report["programs"]) and "in theory    all-reduce 2.0 KiB" in page
    assert step["live"][0][1] >= 2 * part and max(nbytes for _, nbytes in step["live"]) > step["live"][0][1]
    assert {c["axes"] for c in step["collectives"]} <= {"fsdp", "tensor", "fsdp, tensor"} and step["collectives"]
    assert step["memory"]["arguments"] < 2 * 16 * 128 * 4  # parts of the weights and of the batch


@pytest.mark.costs("processes that import all anew")
@pytest.mark.parametrize(
    ("topology", "program", "options", "said"),
    [
        ("v9:2x2", "", (), r"^\[ahead\] got topology 'v9:2x2', expected a chip \(v4, v5e, v5p, v6e, v7x\)"),
        ("v5e", "", (), r"^\[ahead\] got topology 'v5e', expected 2 numbers, as in v5e:2x2"),
        ("cpu:many", "", (), r"^\[ahead\] got topology 'cpu:many', expected a number of devices"),
        ("cpu:2", STEP, ("--world", "3"), r"\[ahead\] got a job of 3 processes, expected at most 2"),
        ("cpu:2", "import torch\ntorch.ones(2, device='xla:2').add(1).cpu()", (), r"got xla:2, available are xla:0"),
        ("cpu:2", "import torch_xla, numpy as np, torch_xla.distributed.spmd as xs\ntorch_xla.runtime.use_spmd()\n"
         "xs.Mesh(np.arange(8), (8,), ('data',))", (), r"Number of device IDs \(8\) must match"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path: Path, topology: str, program: str, options: Any, said: str) -> None:
    done, report = run(tmp_path, program, *options, topology=topology)
    assert done.returncode == (1 if program else 2) and re.search(said, done.stderr, re.MULTILINE), done.stderr
    if not program:
        assert done.stderr.count("\n") == 1 and report is None


@pytest.mark.costs("a process that imports all anew")
def test_another_version_of_the_compiler_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "libtpu-0.0.1.dist-info").mkdir()
    (tmp_path / "libtpu-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n"
    )
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    (tmp_path / "script.py").write_text(STEP)
    command = ["-m", "torch_xla.ahead", "--topology", "v5e:2x2", "script.py"]
    path = os.pathsep.join(map(str, (tmp_path, PACKAGE)))
    done = python(*command, cwd=tmp_path, check=False, **HERE | {"PYTHONPATH": path})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert re.match(
        r"\[ahead\] got libtpu 0.0.1 beside JAX [\d.]+, expected libtpu==.*; pip install 'libtpu==", done.stderr
    )


@pytest.mark.costs("a process that imports all anew")
def test_the_environment_asks_for_it_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{STEP}{LOOP}" + "step()\nprint(torch_xla.device_count())\n")
    done = python("script.py", cwd=tmp_path, **HERE, XLA_AHEAD="cpu:3")
    assert done.stdout == "3\n" and "script.py on cpu:3: 3 devices" in done.stderr
    assert "all 2 programs fit" in done.stderr or "the program fits" in done.stderr


@pytest.mark.costs("processes that import all anew")
def test_what_is_kept_for_a_slice_is_what_it_asks_for(tmp_path: Path) -> None:
    """With CPU devices for chips: what runs there loads what was compiled for their description."""
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "JAX_NUM_CPU_DEVICES": "8"}
    (tmp_path / "script.py").write_text(MESH)
    folder = tmp_path / "cache"
    report = tmp_path / "report.json"
    command = ["-m", "torch_xla.ahead", "--topology", "cpu:8", "--cache", folder, "--json", report, "script.py"]
    done = python(*command, cwd=tmp_path, imported=True, **env)
    kept = sorted(folder.glob("*.xla"))
    assert kept and f"{len(kept)} program" in done.stdout
    tell = (
        "\nfrom torch_xla import _metrics as m\nprint(m.counter('PersistentCacheHit'), m.counter('UncachedCompile'))\n"
    )
    (tmp_path / "script.py").write_text(MESH + tell)
    done = python("script.py", cwd=tmp_path, **env, XLA_PERSISTENT_CACHE_PATH=str(folder))
    assert done.stdout == f"{len(kept)} None\n" and sorted(folder.glob("*.xla")) == kept


TEXT = """
%fused.1 (p: f32[8]) -> f32[16] {
  %ag.1 = f32[16]{0:T(128)} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(2,1,0), frontend_attributes={chain_id="0"}
}
%fused.2 (p: f32[8]) -> f32[16] {
  %ag.2 = f32[16]{0:T(128)} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(2,1,0), frontend_attributes={chain_id="0"}
}
%all-reduce-scatter.1 (p: bf16[64]) -> bf16[16] {
  %ar.0 = bf16[64]{0} all-reduce(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}
%body.1 (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %f.1 = f32[16] fusion(%x), kind=kCustom, calls=%fused.1
  %f.2 = f32[16] fusion(%f.1), kind=kCustom, calls=%fused.2
  %ar.1 = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=1,'b'=4,'c'=2] {'b'}, to_apply=%add
}
%cond.2 (t: (s32[], f32[8])) -> pred[] {
  %c.1 = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %c.1), direction=LT
}
%body.2 (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ar.2 = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}
ENTRY %main.1 (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  %v = (s32[], f32[8]) while(%t), condition=%cond.2, body=%body.2
  %s = bf16[16] fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %g = (f32[8], f32[64]) all-gather-start(%p), replica_groups={}
}
"""


def test_collectives_in_a_loop_count_as_often_as_it_turns() -> None:
    found = {(each.kind, each.groups): (each.count, each.nbytes) for each in hlo.collectives(TEXT)}
    rows = ((0, 2, 4, 6), (1, 3, 5, 7))
    assert found == {
        ("all-gather", ((0, 4), (2, 6), (1, 5), (3, 7))): (5, 5 * 64),
        ("all-reduce", rows): (5, 5 * 32),
        ("reduce-scatter", rows): (1, 32),
        ("all-gather", ()): (1, 256),
        ("all-reduce", ()): (3, 3 * 32),
    }
