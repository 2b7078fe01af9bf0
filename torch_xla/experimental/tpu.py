"""Older path of `torch_xla._internal.tpu`."""

from torch_xla._deprecation import deprecated
from torch_xla._internal import tpu

_HERE = "torch_xla.experimental.tpu"
num_available_chips = deprecated(_HERE, tpu.num_available_chips)
num_available_devices = deprecated(_HERE, tpu.num_available_devices)
num_local_processes = deprecated(_HERE, tpu.num_local_processes)
num_logical_cores_per_chip = deprecated(_HERE, tpu.num_logical_cores_per_chip)
num_tpu_workers = deprecated(_HERE, tpu.num_tpu_workers)
process_bounds_size = deprecated(_HERE, tpu.process_bounds_size)
task_id = deprecated(_HERE, tpu.task_id)
worker_id = deprecated(_HERE, tpu.worker_id)
version = deprecated(_HERE, tpu.version)
get_tpu_env = deprecated(_HERE, tpu.get_tpu_env)
get_tpu_type = deprecated(_HERE, tpu.get_tpu_type)
get_worker_ips = deprecated(_HERE, tpu.get_worker_ips)
