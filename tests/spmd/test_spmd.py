"""SPMD over eight CPU devices. The mode is that of a process, so the tests are in files that another one runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("mesh_*.py")))
def test_over_eight_devices(name: str) -> None:
    environment = {**os.environ, "CPU_NUM_DEVICES": "8", "JAX_NUM_CPU_DEVICES": "8", "XLA_USE_SPMD": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"{name}.py"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_after_the_first_tensor_it_is_too_late() -> None:
    import torch_xla.runtime as xr

    x = torch.ones(2, device="xla")
    with pytest.raises(RuntimeError, match="before the first xla tensor"):
        xr.use_spmd()
    assert not xr.is_spmd() and x.tolist() == [1, 1]
