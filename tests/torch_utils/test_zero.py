"""The optimizer whose state is split over processes, with one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

BATCHES = [torch.randn(4, 6) * 3 for _ in range(5)]


def host_steps(model: nn.Module, batches: list[torch.Tensor], max_norm: float | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    norms = []
    for batch in batches:
        model(batch).square().sum().backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return norms


@pytest.mark.parametrize("clip", [False, True])
def test_steps_are_those_of_the_optimizer_inside(clip: bool, compiles) -> None:
    host = nn.Linear(6, 3)
    model = copy.deepcopy(host).to("xla")
    batches = [batch.to("xla") for batch in BATCHES]
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, grad_clipping=clip, max_norm=2.0, sharding_groups=[[0]]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch_xla.sync()
    norms = []
    with compiles(1):
        for batch in batches:
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            norms.append(optimizer.grad_norm)
            torch_xla.sync()
    expected = host_steps(host, BATCHES, 2.0 if clip else None)
    torch.testing.assert_close(model.weight.detach().cpu(), host.weight.detach(), rtol=1e-4, atol=1e-5)
    assert [float(n) for n in norms if n is not None] == pytest.approx(expected, rel=1e-4)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.025])


def test_copies_are_more_exact_than_the_parameters() -> None:
    host = nn.Linear(6, 1, bias=False)
    nn.init.ones_(host.weight)
    model = copy.deepcopy(host).to("xla").bfloat16()
    options: dict[str, Any] = {"lr": 1e-4, "grad_clipping": False, "save_master_weights": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, use_grad_acc_hook=True, **options)
    for _ in range(30):  # steps that are too small for the parameters one by one
        for _ in range(2):
            model(torch.full((1, 6), 0.5, device="xla").bfloat16()).sum().backward()
        assert model.weight.grad is None and model.weight.main_grad.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    assert state["sharded_master_weights"][0].cpu()[0, 0].item() == pytest.approx(0.997, rel=1e-5)
    assert model.weight.cpu()[0, 0].item() == torch.tensor(0.997).bfloat16().item()

    other = copy.deepcopy(host).to("xla").bfloat16()
    again = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, **options)
    again.load_state_dict(torch_xla.core.xla_model._maybe_convert_to_cpu(state))
    assert torch.equal(other.weight.cpu(), model.weight.cpu())
    assert again.get_shape_info() == state["shape_info"] == {0: torch.Size([1, 6])}


def test_state_is_that_of_the_optimizer_inside() -> None:
    model, plain = nn.Linear(6, 3).to("xla"), nn.Linear(6, 3).to("xla")
    plain.load_state_dict(model.state_dict())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, max_norm=1e9, lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    for module, stepping in ((model, optimizer), (plain, reference)):
        module(BATCHES[0].to("xla")).square().sum().backward()
        gradient = module.weight.grad.cpu()
        stepping.step()
        assert torch.equal(module.weight.grad.cpu(), gradient)
    state = optimizer.state_dict()
    for number, values in reference.state_dict()["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(state["base_state"][number][name].cpu(), value.cpu())
    optimizer.load_state_dict(state)
    for module, stepping in ((model, optimizer), (plain, reference)):
        stepping.zero_grad()
        module(BATCHES[1].to("xla")).square().sum().backward()
        stepping.step()
    torch.testing.assert_close(model.weight.detach().cpu(), plain.weight.detach().cpu())


def test_what_it_refuses() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(ValueError, match=r"\[zero\] got parameters on \['cpu'\]"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model.to("xla")
    with pytest.raises(ValueError, match=r"\[zero\] groups=\[\[0, 1\]\], expected \[\[0\]\] or None"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, sharding_groups=[[0, 1]])
    late = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, lazy_init=True)
    with pytest.raises(RuntimeError, match=r"\[zero\] nothing was initialized"):
        late.step()
    late.init_zero()
    assert late.inited and late.step() is None
