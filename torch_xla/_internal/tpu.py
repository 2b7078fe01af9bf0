"""Answers what other libraries ask about TPUs without starting a client.

Lightning takes a positive `num_available_devices` as "train on XLA". On a host without TPU the answer is therefore the
number of XLA devices only where ``PJRT_DEVICE`` asks for them; merely having this package installed changes nothing.
"""

from __future__ import annotations

import os
import pathlib
import re

from torch_xla import _config
from torch_xla._core.device import client, described, environment
from torch_xla._errors import message

_GOOGLE_VENDOR = "0x1ae0"
_CHIPS = {
    "0x0027": "v3 or older",
    "0x005e": "v4",
    "0x0056": "v5e",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}


def num_available_chips() -> int:
    """Number of TPU chips on this host's PCI bus."""
    count = 0
    for vendor in pathlib.Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _GOOGLE_VENDOR:
                count += (vendor.parent / "device").read_text().strip() in _CHIPS
        except OSError:
            continue  # a device may vanish while we look
    return count


def num_logical_cores_per_chip() -> int:
    """Number of XLA devices on one chip."""
    return 2 if version() <= 3 else 1


def num_available_devices() -> int:
    """Number of XLA devices of this host that training may use: TPU devices, or those that ``PJRT_DEVICE`` asks for."""
    chips = 0 if described.topology() is not None else num_available_chips()
    if chips:
        return chips * num_logical_cores_per_chip()
    platform = _config.PJRT_DEVICE.get()
    asked = platform and platform.upper() != "TPU"
    return client.device_count() if asked or described.topology() is not None else 0


def num_local_processes() -> int:
    """Number of processes to start on this host."""
    chips, processes = num_available_chips(), process_bounds_size()
    return min(chips, processes) if processes else chips


def num_tpu_workers() -> int:
    """Number of hosts of the TPU slice."""
    return len(get_worker_ips())


def num_expected_global_devices() -> int:
    """Number of XLA devices of the TPU slice."""
    return num_available_devices() * num_tpu_workers()


def process_bounds_size() -> int | None:
    """Number of processes over all hosts according to ``TPU_PROCESS_BOUNDS``, or None."""
    bounds = os.environ.get("TPU_PROCESS_BOUNDS")
    if not bounds:
        return None
    size = 1
    for part in bounds.split(","):
        size *= int(part)
    return size


def task_id() -> int | None:
    """Index of this process among all TPU processes (``CLOUD_TPU_TASK_ID``), or None."""
    value = os.environ.get("CLOUD_TPU_TASK_ID")
    return int(value) if value else None


def worker_id() -> int:
    """Index of this host in the TPU slice."""
    return int(get_tpu_env()["WORKER_ID"])


def get_tpu_env() -> dict[str, str]:
    """The TPU's description, from ``TPU_*`` variables or the machine's metadata service.

    OSError where there is no TPU.
    """
    if (topology := described.topology()) is not None:
        return {"ACCELERATOR_TYPE": f"{topology.partition(':')[0]}-{len(described.devices())}", "WORKER_ID": "0"}
    if os.environ.get("TPU_ACCELERATOR_TYPE"):
        names = {
            "ACCELERATOR_TYPE": ("TPU_ACCELERATOR_TYPE",),
            "TPU_PROCESS_BOUNDS": ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
            "WORKER_ID": ("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID"),
        }
        settings = {key: next((os.environ[n] for n in tries if n in os.environ), "") for key, tries in names.items()}
        return settings | {"WORKER_ID": settings["WORKER_ID"] or "0"}
    pairs = (line.split(":", 1) for line in _metadata("tpu-env").splitlines() if ":" in line)
    return {key.strip(): value.strip().strip("'\"") for key, value in pairs}


def get_tpu_type() -> str:
    """Generation and kind of the TPU, such as ``"v6e"``; OSError where there is none."""
    return get_tpu_env()["ACCELERATOR_TYPE"].split("-")[0]


def version() -> int:
    """Generation of the TPU, such as 4; OSError where there is none."""
    kind = get_tpu_env().get("ACCELERATOR_TYPE", "")
    match = re.match(r"(?:v|tpu)(\d+)", kind)
    if not match:
        raise OSError(message("tpu", f"accelerator type {kind!r}", expected="a name such as v4-8"))
    return int(match.group(1))


def get_worker_ips() -> list[str]:
    """Addresses of the TPU slice's hosts, in order; one for a single host; OSError where there is no TPU."""
    if os.environ.get("TPU_WORKER_HOSTNAMES"):
        hosts = os.environ["TPU_WORKER_HOSTNAMES"].split(",")
    else:
        _metadata("worker-network-endpoints")
        hosts = environment.pod_hosts()
    return hosts if len(hosts) > 1 else ["localhost"]


def discover_master_worker_ip(use_localhost: bool = True) -> str:
    """Address of the host that leads the job; a single one may be called ``localhost``."""
    hosts = get_worker_ips()
    return hosts[0] if use_localhost or hosts != ["localhost"] else "127.0.0.1"


def _metadata(key: str) -> str:
    if os.environ.get("TPU_SKIP_MDS_QUERY"):
        raise OSError(
            message("tpu", "TPU_SKIP_MDS_QUERY forbids asking the metadata service", do="set TPU_ACCELERATOR_TYPE")
        )
    response = environment.metadata(key)
    if not response:
        raise OSError(message("tpu", "no TPU metadata on this machine", do="set TPU_ACCELERATOR_TYPE"))
    return response
