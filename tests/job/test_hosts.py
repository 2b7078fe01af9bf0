"""Which process of which job this is, as the environment tells."""

from __future__ import annotations

import socket

import pytest
from probes import python, start

from torch_xla._core.device import environment
from torch_xla._core.device.environment import RankInfo, first_host, rank_info

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "SLURM_STEP_NUM_TASKS",
         "SLURM_PROCID")  # fmt: skip

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
            "MASTER_ADDR": "a", "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
SLURM = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
         "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
         "SLURM_JOB_ID": "123456"}  # fmt: skip
POD = {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, RankInfo()),
        (TORCHRUN, RankInfo(5, 8, 1, 4, 1, "a", 1234, True)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "b"},
         RankInfo(3, 4, 1, 2, 1, "b", 29500)),
        (SLURM, RankInfo(4, 5, 0, 1, 2, "gpu07", 23456)),
        (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "77"}, RankInfo(4, 5, 0, 1, 2, "m", 77)),
        (POD, RankInfo(1, 2, 0, 1, 1, "10.0.0.1", 29500)),
        (SLURM | TORCHRUN, RankInfo(5, 8, 1, 4, 1, "a", 1234, True)),
        ({"TPU_WORKER_HOSTNAMES": "10.0.0.1", "TPU_WORKER_ID": "0"}, RankInfo()),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, RankInfo()),
    ],
)  # fmt: skip
def test_discovery(monkeypatch, variables, expected):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_info() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("a", "a"),
        ("b-1,a", "b-1"),
        ("n[1-3]", "n1"),
        ("n[08-10,12],m", "n08"),
        ("r[1-2].site,x", "r1.site"),
    ],
)
def test_the_first_of_a_list_of_hosts(text, expected):
    assert first_host(text) == expected


def test_tasks_per_host():
    assert environment._tasks_per_host("2(x3),1") == [2, 2, 2, 1]


def test_a_rank_that_cannot_be(monkeypatch):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"\[job\] got rank 4 of 4 processes, expected 0 to 3"):
        rank_info()


JOIN = "import torch_xla.core.xla_model as xm; xm.rendezvous('start')"


def test_a_missing_address():
    done = python("-c", JOIN, check=False, imported=True, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert (
        "without MASTER_ADDR, expected the host of rank 0 in it; start the processes with torch_xla.launch"
        in done.stderr
    )


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = python("-c", JOIN, check=False, imported=True, **env)
    assert done.returncode == 1
    assert f"rank 0 could not listen at 127.0.0.1:{port}" in done.stderr and "a port that is free there" in done.stderr


def test_who_does_not_come_is_named():
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "XLA_JOB_START_TIMEOUT": "2"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = python("-c", JOIN, check=False, imported=True, MASTER_PORT=port, **env)
    assert done.returncode == 1
    assert "rank 0 waited" in done.stderr and "rank 1, which has not joined the job" in done.stderr
    assert "XLA_JOB_START_TIMEOUT sets how long" in done.stderr


def test_a_stranger_at_the_port_of_a_job():
    """A process of another job that connects is refused, and the job goes on."""
    member = "import sys, torch_xla.core.xla_model as xm; xm.rendezvous('start'); print('up', flush=True); "
    member += "sys.stdin.readline(); xm.rendezvous('end')"
    env = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["MASTER_PORT"] = str(server.getsockname()[1])
    both = [start("-c", member, devices=1, imported=True, **env, RANK=rank) for rank in "01"]
    try:
        assert [process.stdout.readline() for process in both] == ["up\n"] * 2
        done = python("-c", JOIN, check=False, imported=True, **env, RANK="1")
        assert done.returncode == 1 and f"a job runs already at 127.0.0.1:{env['MASTER_PORT']}" in done.stderr
        for process in both:  # they wait for each other
            process.stdin.write("\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=30)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], errors
    finally:
        for process in both:
            process.kill()


def test_another_number_of_processes():
    env = {"MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["MASTER_PORT"] = str(server.getsockname()[1])
    both = [
        start("-c", JOIN, devices=1, imported=True, **env, RANK=rank, WORLD_SIZE=world) for rank, world in ("02", "13")
    ]
    errors = [process.communicate(timeout=30)[1] for process in both]
    assert all("WORLD_SIZE=" in text and "it must be the same everywhere" in text for text in errors), errors
