"""Device ``xla`` without an index where PyTorch traces with fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_xla  # noqa: F401

MAKERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.arange(3, device="xla"),
    lambda x: torch.tensor([1.0, 2.0, 3.0], device="xla"),
    lambda x: torch.ones(3).to("xla"),
    lambda x: torch.zeros_like(x, device="xla"),
    lambda x: x.new_full((3,), 2.0, device="xla"),
    lambda x: torch.rand(3, device="xla") * 0,
]


@pytest.mark.parametrize("backend", ["openxla", "aot_eager", "eager"])
def test_compiled(backend: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.stack([x + make(x) for make in MAKERS])

    x = torch.ones(3, device="xla")
    assert torch.equal(torch.compile(function, backend=backend)(x).cpu(), function(x).cpu())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of export itself
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x + make(x) for make in MAKERS])

    x = torch.ones(3, device="xla")
    program = torch.export.export(Model(), (x,), strict=strict)
    for each in (program, program.run_decompositions()):
        assert torch.equal(each.module()(x).cpu(), Model()(x).cpu())


def test_fake_tensors_are_on_the_current_device() -> None:
    with FakeTensorMode():
        x = torch.empty(3, device="xla")
        assert x.device == (x + torch.ones(3).to("xla")).device == torch.device("xla:0")
        assert torch.empty(3, device="xla:1").device == torch.device("xla:1")
        with torch.xla.device(2):
            assert torch.empty(5, 7, device="xla").device == torch.device("xla:2")
        assert torch.empty(3, device="cpu").device == torch.device("cpu")
