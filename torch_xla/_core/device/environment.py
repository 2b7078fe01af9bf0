"""Reads from the environment which process of which job this is: ``RANK=1 WORLD_SIZE=4`` is rank 1 of 4.

The first of these that is set counts: torchrun's variables, which `torch_xla.launch` sets too; SLURM's of a step that
`srun` started; those of a TPU pod, or what its metadata server says.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

from torch_xla import _config
from torch_xla._core.device import described
from torch_xla._errors import message


@dataclass(frozen=True)
class RankInfo:
    """A process's place in its job: its number among all, and among those of its host."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    host: int = 0  # number of its host
    address: str | None = None  # where the processes meet; None where nothing says so
    port: int = 29500
    served: bool = False  # whether somebody else than rank 0 listens there, as torchrun does


_imagined: RankInfo | None = None
_chosen_rank = 0


def choose_rank(rank: int) -> None:
    """Says which of a job's processes this is to be, where the others are not there."""
    global _chosen_rank
    _chosen_rank = rank


def stand_for(world: int, local_world: int) -> None:
    """Makes this process one of a job whose others are not there, as its devices are not; with so many on a host."""
    global _imagined
    rank = _chosen_rank
    _imagined = RankInfo(rank, world, rank % local_world, local_world, rank // local_world, "127.0.0.1")


def rank_info() -> RankInfo:
    """The place of this process; alone where nothing tells of others.

    ValueError where variables contradict each other.
    """
    if described.topology() is None:
        info = _torchrun() or _slurm() or _tpu_pod() or _alone()
    else:
        info = _imagined or _torchrun() or _slurm() or RankInfo()
    if not 0 <= info.rank < info.world:
        raise ValueError(
            message("job", f"got rank {info.rank} of {info.world} processes", expected=f"0 to {info.world - 1}")
        )
    return info


def _alone() -> RankInfo:
    return RankInfo(
        local_rank=_config.PJRT_LOCAL_PROCESS_RANK.get(), local_world=_config.PJRT_LOCAL_PROCESS_COUNT.get()
    )


def _torchrun() -> RankInfo | None:
    if not (_config.RANK.is_set() and _config.WORLD_SIZE.is_set()):
        return None
    rank, world = _config.RANK.get(), _config.WORLD_SIZE.get()
    local_world = _config.LOCAL_WORLD_SIZE.get() if _config.LOCAL_WORLD_SIZE.is_set() else 1
    group = os.environ.get("GROUP_RANK")
    return RankInfo(
        rank,
        world,
        _config.LOCAL_RANK.get(),
        local_world,
        int(group) if group else rank // local_world,
        _config.MASTER_ADDR.get(),
        _config.MASTER_PORT.get(),
        _config.TORCHELASTIC_USE_AGENT_STORE.get(),
    )


def _slurm() -> RankInfo | None:
    world = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if world < 2 or "SLURM_PROCID" not in os.environ:
        return None
    host = int(os.environ.get("SLURM_NODEID", "0"))
    counts = _tasks_per_host(os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
    return RankInfo(
        int(os.environ["SLURM_PROCID"]),
        world,
        int(os.environ.get("SLURM_LOCALID", "0")),
        counts[host] if host < len(counts) else 1,
        host,
        _config.MASTER_ADDR.get() or first_host(os.environ.get("SLURM_STEP_NODELIST", "")),
        # One port per job, so that two jobs on a host do not meet.
        _config.MASTER_PORT.get()
        if _config.MASTER_PORT.is_set()
        else 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000,
    )


def _tasks_per_host(text: str) -> list[int]:
    """``"2(x3),1"`` as ``[2, 2, 2, 1]``."""
    task_counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        task_counts += [int(count)] * int(times or 1)
    return task_counts


def first_host(text: str) -> str | None:
    """The first of SLURM's list of hosts, such as ``"a[01-03,7],b"``."""
    name, number, rest = re.findall(r"^([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,\[]*)", text)[0]
    return name + number + rest or None


def _tpu_pod() -> RankInfo | None:
    hosts = [h for h in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if h]
    task = os.environ.get("CLOUD_TPU_TASK_ID") or os.environ.get("TPU_WORKER_ID")
    if not hosts and _config.PJRT_DEVICE.get() == "TPU":
        hosts = pod_hosts()
        task = metadata("agent-worker-number")
    if len(hosts) < 2 or not task or not task.isdigit():
        return None
    return RankInfo(
        int(task),
        len(hosts),
        _config.PJRT_LOCAL_PROCESS_RANK.get(),
        _config.PJRT_LOCAL_PROCESS_COUNT.get(),
        int(os.environ.get("TPU_WORKER_ID") or task),
        _config.MASTER_ADDR.get() or hosts[0],
        _config.MASTER_PORT.get(),
    )


def pod_hosts() -> list[str]:
    """Addresses of a pod's hosts, as Google's server of metadata tells them; none where there is no such server."""
    # Each is "state:version:address".
    return [worker.split(":")[-1] for worker in metadata("worker-network-endpoints").split(",") if worker]


def metadata(name: str) -> str:
    """An attribute of this virtual machine from Google's metadata server; "" if there is none."""
    return _ask(os.environ.get("GCE_METADATA_HOST", "metadata.google.internal"), name)


@functools.cache
def _ask(server: str, name: str) -> str:
    import urllib.request

    address = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
