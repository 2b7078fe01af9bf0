"""What ``PT_XLA_DEBUG_LEVEL`` prints: causes, graphs, frames, memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torch_xla
from torch_xla._core.compile import cache
from torch_xla.core import dynamo_bridge
from torch_xla.debug import profiler
from torch_xla.distributed import parallel_loader
from torch_xla.experimental import eager_mode_context


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the analyses, at level 2."""
    torch_xla.sync()
    cache.clear()
    path = tmp_path / "analysis.txt"
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(path))
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "2")
    return path


def causes(path: Path, kind: str) -> list[str]:
    return re.findall(rf"^{kind} Analysis: {kind} Cause\n{kind} Analysis:   (.*)$", path.read_text(), re.MULTILINE)


def facts(path: Path, name: str) -> list[str]:
    return re.findall(rf"^\w+ Analysis:   {name}: (.*)$", path.read_text(), re.MULTILINE)


def test_a_barrier_of_the_user(report: Path) -> None:
    x = torch.randn(3, 3, device="xla")
    torch_xla.sync()
    assert causes(report, "Compilation") == causes(report, "Execution") == ["user torch_xla.sync"]
    assert len(set(facts(report, "Graph Hash"))) == 1
    # The seed of the random numbers is the one input.
    assert facts(report, "Number of Graph Inputs") == facts(report, "Number of Graph Outputs") == ["1", "1"]
    assert x.shape == (3, 3)


def test_frames_start_at_the_call_and_are_limited(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT_XLA_DEBUG_MAX_FRAME", "2")
    x = torch.randn(3, 4, device="xla")
    torch_xla.sync()
    _, first, second, more, rule, *_ = report.read_text().partition("Triggered Execution: ")[2].splitlines()
    assert re.fullmatch(r"Compilation Analysis:   sync \(.*_api.py:\d+\)", first)
    assert re.fullmatch(rf"Compilation Analysis:   test_frames_.* \({re.escape(__file__)}:\d+\)", second)
    assert more == "Compilation Analysis:   .........."
    assert rule == "Compilation Analysis: " + "-" * 80
    assert x.shape == (3, 4)


def test_sizes_after_a_compile(report: Path) -> None:
    x = torch.ones(256, 1024, device="cpu").to("xla")
    y = x.sin()
    torch_xla.sync()
    text = report.read_text()
    names = ["Graph input", "Graph output", "Aliased Input", "Intermediate tensor", "Compiled program"]
    sizes = [re.search(rf"Post Compilation Analysis: {name} size: ([\d.]+) GB\n", text) for name in names]
    assert all(sizes)
    assert float(sizes[1].group(1)) == pytest.approx(2**20 / 2**30, rel=0.01)  # type: ignore[union-attr]
    assert y.shape == (256, 1024)


def test_a_value_that_is_read(report: Path) -> None:
    torch.randn(64, 64, device="xla").matmul(torch.randn(64, 64, device="xla")).tolist()
    assert all("trying to access tensor value" in cause for cause in causes(report, "Compilation"))
    assert len(causes(report, "Compilation")) == 1


def test_a_compiled_function(report: Path) -> None:
    x = torch.randn(3, 5, device="xla")

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x, 1)

    torch_xla.compile(program)(x)
    assert causes(report, "Compilation") == [
        "torch_xla.compile clear the pending graph prior calling the target function",
        "torch_xla.compile",
    ]
    names = ["program_clear_pending", "program"]
    assert facts(report, "Graph Name") == [name for name in names for _ in range(2)]


def test_a_loader(report: Path) -> None:
    for batch in parallel_loader.MpDeviceLoader([torch.zeros(2, 7)] * 4, "xla"):
        result = batch + 100
    assert causes(report, "Compilation") == ["torch_xla.sync in parallel loader at step end"]
    assert causes(report, "Execution") == ["torch_xla.sync in parallel loader at step end"] * 4
    assert set(facts(report, "Number of Graph Inputs")) == {"2"}
    assert result.shape == (2, 7)


def test_levels(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with eager_mode_context(True):
        torch.randn(4, 6, device="xla")
        torch_xla.sync()
    assert not report.exists()
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "1")
    x = torch.randn(3, 6, device="xla")
    torch_xla.sync()
    assert len(causes(report, "Compilation")) == 1 and not causes(report, "Execution")
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "-1")
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    y = torch.randn(3, 6, device="xla")
    torch_xla.sync()
    assert len(causes(report, "Execution")) == 1
    assert x.shape == y.shape


def test_a_file_that_cannot_be_written(
    report: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(report.parent / "absent" / "file"))
    x = torch.ones(3).to("xla").tanh()
    torch_xla.sync()
    told = capfd.readouterr().err
    assert "[debug] PT_XLA_DEBUG_FILE=" in told and "user torch_xla.sync" in told
    torch.testing.assert_close(x.cpu(), torch.ones(3).tanh())


def test_a_step_of_a_profile_and_a_dynamo_graph_name_themselves(report: Path) -> None:
    x = torch.randn(3, 7, device="xla")
    y = dynamo_bridge.extract_compiled_graph(torch.fx.symbolic_trace(lambda x: x * 100), (x,))(x)
    with profiler.StepTrace("step", step_num=1):
        z = y.sin()
    inputs = "torch_xla.sync when dynamo processing input graphs"
    step = "torch_xla.sync when exiting a profiler StepTrace region"
    assert causes(report, "Compilation") == [inputs, "dynamo is compiling a FX graph to HLO", step]
    assert causes(report, "Execution") == [inputs, "dynamo is executing a compiled program", step]
    assert z.shape == (3, 7)
