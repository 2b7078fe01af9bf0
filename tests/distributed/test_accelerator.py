"""xla as the accelerator of a process; what runs is in accelerator_bodies.py."""

from __future__ import annotations

from pathlib import Path

import accelerator_bodies
import pytest
from probes import python

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_programs_for_whichever_accelerator_there_is() -> None:
    launcher.run(accelerator_bodies.device_agnostic, (), 2)


def test_asked_for_by_a_variable_or_told_how() -> None:
    folder = Path(__file__).parent
    python("-c", "import accelerator_bodies; accelerator_bodies.refused()", cwd=folder)
    asked = "import torch, torch_xla; assert torch.accelerator.current_accelerator().type == 'xla'"
    python("-c", asked, XLA_USE_AS_ACCELERATOR="1")
