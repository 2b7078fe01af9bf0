"""Programs compiled for a TPU that is not here, where its compiler is installed."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import torch_xla  # noqa: F401
from benchmarks import ahead, tpu_models

pytestmark = pytest.mark.skipif(not ahead.available(), reason="the compiler is package libtpu")


def test_a_training_step() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(1), nn.Linear(144, 3))
    model.to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = nn.functional.cross_entropy(model(torch.ones(2, 1, 8, 8, device="xla")), torch.ones(2).long().to("xla"))
    loss.backward()
    optimizer.step()
    program = ahead.compiled(ahead.lowered(ahead.chips(), [loss, *model.parameters()]))
    assert program.memory_analysis().argument_size_in_bytes > 4 * sum(p.numel() for p in model.parameters())
    assert loss.isfinite().item()  # and what is here can run it too


@pytest.mark.parametrize("name", ["Pallas kernel of JAX's", "int8 weights", "paged attention"])
def test_a_program_of_the_table(name: str) -> None:
    recorded = tpu_models.PROGRAMS[name][0]("")
    text = ahead.compiled(ahead.lowered(ahead.chips(), recorded.held)).as_text()
    assert ("tpu_custom_call" in text) == (name == "Pallas kernel of JAX's")
