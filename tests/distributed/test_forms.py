"""What PyTorch's interfaces of jobs take beside the plainest call; what the processes run is in form_bodies.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import form_bodies
import pytest

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_strided_tensors_limits_and_messages_in_compiled_functions() -> None:
    launcher.run(form_bodies.collectives, (), 2)


def test_norms_of_distributed_tensors_and_a_mesh_of_the_host() -> None:
    launcher.run(form_bodies.norms, (), 2)


def test_a_process_without_a_part_of_a_parameter_saves_and_loads(tmp_path: Path) -> None:
    launcher.run(form_bodies.empty_shards, (str(tmp_path),), 2)


MINIMUM = """
import torch, torch_xla, torch.distributed as dist
import torch_xla.distributed.xla_backend
{before}
dist.init_process_group("xla")
x = torch.ones(2, device="xla")
dist.all_reduce(x)
assert x.tolist() == [2, 2]
dist.destroy_process_group()
"""


@pytest.mark.parametrize("before", ["", "torch_xla.core.xla_model.rendezvous('before')"], ids=["first", "later"])
def test_the_variables_that_pytorch_needs_are_enough(before: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    left_out = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", MINIMUM.format(before=before and f"import torch_xla.core.xla_model; {before}")]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
