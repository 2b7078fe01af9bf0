"""SPMD over eight CPU devices. The mode is that of a process, so the tests are in files that another process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import plugin
import pytest
import two_hosts
from probes import python
from torch.multiprocessing.spawn import ProcessRaisedException

from torch_xla._core.job import launcher

HERE = Path(__file__).parent


ALONE = pytest.mark.own_client("a plugin for CPUs knows its own process only")
NAMES = sorted(path.stem for path in HERE.glob("mesh_*.py"))


def run(names: list[str], marks: str, seconds: int, folder: Path) -> dict[str, str]:
    """What failed, by file; one process runs them all."""
    environment = {**os.environ, "CPU_NUM_DEVICES": "8", "JAX_NUM_CPU_DEVICES": "8", "XLA_USE_SPMD": "1"}
    if os.environ["PJRT_DEVICE"] == plugin.NAME:
        environment |= plugin.environment(folder, cpu_device_count=8)
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    command += [f"--junitxml={results}", *(f"{name}.py" for name in names)]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode in (0, 1), done.stdout[-6000:] + done.stderr[-2000:]
    failed: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = next(part for part in case.attrib["classname"].split(".") if part in names)
        texts = [f"{case.attrib['name']}: {part.text}" for part in case if part.tag in ("failure", "error")]
        failed[name] = failed.get(name, "") + "\n".join(texts)
    return failed


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the files that this run is to test."""
    items = [item for item in request.session.items if "failed" in getattr(item, "fixturenames", ())]
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    return run(names, "not sweep", 500, tmp_path_factory.mktemp("eight"))


@pytest.mark.timeout(520)
@pytest.mark.parametrize("name", NAMES)
def test_over_eight_devices(name: str, failed: dict[str, str]) -> None:
    assert failed[name] == ""


@pytest.mark.sweep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [name for name in NAMES if "pytest.mark.sweep" in (HERE / f"{name}.py").read_text()])
def test_long_tables_over_eight_devices(name: str, tmp_path: Path) -> None:
    assert run([name], "sweep", 3000, tmp_path) == {name: ""}


@ALONE
@pytest.mark.slow
def test_two_processes_with_four_devices_each() -> None:
    launcher.run(two_hosts.train, (two_hosts.reference(),), 2)


@ALONE
@pytest.mark.parametrize("how", ["values", "numbers", "operators"])
def test_processes_that_differ(how: str) -> None:
    launcher.run(two_hosts.differ, (how,), 2)


READ = r"a read of float32\[8, 8\] in parts of \[1, 8\]"
LINE = r"two_hosts\.py:\d+ in (read|right|<genexpr>)"


@ALONE
def test_reads_by_all_of_what_is_split_over_processes() -> None:
    launcher.run(two_hosts.read, ("by all",), 2)


@ALONE
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("in another order", f"rank 0 runs {READ}, number 1 .*{LINE}.*, rank 1 runs {READ}, number 2 .*{LINE}"),
        ("by one alone", f"wait for each other.* in {READ} .*{LINE}"),
        ("of known programs in another order", f"rank . runs program .*{LINE}.*, rank . runs program .*{LINE}"),
        ("by one at the end", rf"rank 1 has ended \(its program was over\), and rank 0 waits for it in {READ}.*{LINE}"),
    ],
)
def test_reads_of_what_is_split_over_processes(how: str, told: str) -> None:
    with pytest.raises(ProcessRaisedException, match=told):
        launcher.run(two_hosts.read, (how,), 2)


def test_tensors_from_before_are_on_each_device() -> None:
    """Parameters, views of them that were read, an optimizer's state, what is pending and what is on the host."""
    python(
        "-c",
        """
import warnings
import numpy as np
import torch, torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

def train(device, between):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)).to(device)
    x, optimizer = torch.rand(4, 8).to(device), torch.optim.AdamW(model.parameters(), lr=1e-2)
    view = model[0].weight.detach()[3:, ::2]
    view.sum().item(), view.tolist()
    for i in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if i == 1:
            x = x + 1
            between(model)
        torch_xla.sync()
    return [t.cpu() for t in (view, view.t() * 2, x, *model.parameters())]

def split(model):
    late, unused = torch.arange(3.0).to("xla"), torch.zeros(5, device="xla")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        xr.use_spmd()
        xr.use_spmd()
    assert [str(w.message)[:39] for w in told] == ["[spmd] xla tensors were made before SPM"], told
    xs.mark_sharding(model[0].weight, xs.Mesh(np.arange(4), (4,), ("x",)), ("x", None))
    assert late.tolist() == [0, 1, 2] and unused.tolist() == [0] * 5

for ours, theirs in zip(train("xla", split), train("cpu", lambda model: None)):
    torch.testing.assert_close(ours, theirs)
assert xr.is_spmd()
""",
        imported=True,
    )


def test_a_view_made_before_the_mode_has_parts_everywhere() -> None:
    script = """
import torch, torch_xla, torch_xla.runtime as xr
x = torch.arange(32.0).reshape(8, 4).to("xla")
view = x[1:]
xr.use_spmd()
assert view.sum().item() == sum(range(4, 32)), view
"""
    python("-c", script, devices=4, imported=True, XLA_HOST_COMPUTE="never")
