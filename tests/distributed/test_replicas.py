"""A model on several devices of one process, each with a thread: the oldest interface."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torch_xla.core.xla_model as current
import torch_xla_py.data_parallel as dp
import torch_xla_py.xla_model as xm
from torch_xla.distributed import data_parallel

BATCHES = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(9)]
DEVICES = ["xla:0", "xla:2", "xla:1"]


def loop(model: nn.Module, loader: Any, device: torch.device, context: dp.Context) -> list[int]:
    optimizer = context.getattr_or("optimizer", lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen = []
    for number, (data, target) in loader:
        assert data.device == device == next(model.parameters()).device
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), target).backward()
        xm.optimizer_step(optimizer)
        seen.append(number)
    return seen


def test_copies_train_as_one_model_does() -> None:
    assert xm.optimizer_step is current.optimizer_step and issubclass(dp.DataParallel, data_parallel.DataParallel)
    host = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    parallel = dp.DataParallel(copy.deepcopy(host), device_ids=DEVICES)
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1, momentum=0.9)
    for batches in (BATCHES, BATCHES[:8]):  # two of the last three are nobody's
        rounds = len(batches) // 3
        assert parallel(loop, batches) == [list(range(rounds))] * 3
        for first in range(0, 3 * rounds, 3):
            optimizer.zero_grad()
            data, target = (torch.cat(parts) for parts in zip(*batches[first : first + 3], strict=True))
            nn.functional.mse_loss(host(data), target).backward()
            optimizer.step()
    for model in parallel.models:
        for ours, theirs, first in zip(
            model.parameters(), host.parameters(), parallel.models[0].parameters(), strict=True
        ):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
            assert torch.equal(ours.cpu(), first.cpu())


def test_no_devices_is_the_plain_cpu() -> None:
    parallel = dp.DataParallel(lambda: nn.Linear(4, 2), device_ids=[])
    assert parallel(loop, BATCHES) == [list(range(9))]
    assert parallel.devices == ["cpu"]


@pytest.mark.parametrize(
    ("at", "error", "text"),
    [
        ("forward", KeyError, "no such key"),
        ("early", RuntimeError, r"takes a step and the loop of xla:2 is over"),
    ],
)
def test_a_loop_that_fails_or_ends_early_ends_all(at: str, error: type[Exception], text: str) -> None:
    parallel = dp.DataParallel(nn.Linear(4, 2), device_ids=DEVICES)

    def broken(model: nn.Module, loader: Any, device: torch.device, context: dp.Context) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (data, _) in loader:
            if number == 1 and device.index == 2:
                if at == "early":
                    return
                raise KeyError("no such key")
            model(data).sum().backward()
            xm.optimizer_step(optimizer)

    with pytest.raises(error, match=text):
        parallel(broken, BATCHES)
    assert parallel(loop, BATCHES[:3]) == [[0]] * 3


def test_a_device_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[data_parallel\] got device_ids=.*, expected each device once"):
        dp.DataParallel(nn.Linear(1, 1), ["xla:1", "xla:1"])
