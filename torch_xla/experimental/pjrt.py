"""Older path of `torch_xla.runtime`."""

from torch_xla import runtime
from torch_xla._deprecation import deprecated
from torch_xla.core import xla_model

_HERE = "torch_xla.experimental.pjrt"
device_type = deprecated(_HERE, runtime.device_type)
set_device_type = deprecated(_HERE, runtime.set_device_type)
local_process_count = deprecated(_HERE, runtime.local_process_count)
global_device_count = deprecated(_HERE, runtime.global_device_count)
world_size = deprecated(_HERE, runtime.world_size)
local_device_count = deprecated(_HERE, runtime.local_device_count)
addressable_device_count = deprecated(_HERE, runtime.addressable_device_count)
global_ordinal = deprecated(_HERE, runtime.global_ordinal)
local_ordinal = deprecated(_HERE, runtime.local_ordinal)
process_index = deprecated(_HERE, runtime.process_index)
process_count = deprecated(_HERE, runtime.process_count)
using_pjrt = deprecated(_HERE, runtime.using_pjrt)
broadcast_master_param = deprecated(_HERE, xla_model.broadcast_master_param)
rendezvous = deprecated(_HERE, xla_model.xla_rendezvous)
