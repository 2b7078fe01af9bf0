"""PyTorch on XLA: a lazy device ``xla`` for CPU, NVIDIA GPU and TPU.

Importing registers the device; clients, threads and JAX start with the first tensor on it.
"""

import sys as _sys

from torch_xla import _bindings, _config, _device_module, _serialization, _torch_internals

# Libraries reach these as attributes after a plain `import torch_xla`.
from torch_xla import _internal as _internal
from torch_xla import amp as amp
from torch_xla import backends as backends
from torch_xla import core as core
from torch_xla import debug as debug
from torch_xla import distributed as distributed
from torch_xla import experimental as experimental
from torch_xla import runtime as runtime
from torch_xla import utils as utils
from torch_xla._api import device as device
from torch_xla._api import device_count as device_count
from torch_xla._api import devices as devices
from torch_xla._api import manual_seed as manual_seed
from torch_xla._api import real_devices as real_devices
from torch_xla._api import sync as sync
from torch_xla._compile import compile as compile
from torch_xla._compile import set_custom_compile_options as set_custom_compile_options
from torch_xla._compile import step as step
from torch_xla._core.torch import install as _recording
from torch_xla._core.torch import optimizers as _optimizers
from torch_xla._graph import Graph as Graph
from torch_xla._launch import launch as launch
from torch_xla._legacy import xlac as _XLAC
from torch_xla._version import __version__ as __version__

xm, xr = core.xla_model, runtime  # scripts use these names too
_sys.modules[f"{__name__}._XLAC"] = _XLAC  # and import this one

__all__ = [
    "Graph",
    "__version__",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "set_custom_compile_options",
    "step",
    "sync",
]

_torch_internals.register_device_module("xla", _device_module)
_recording.install()
_optimizers.install()
_serialization.install()
if _config.XLA_USE_EAGER_DEBUG_MODE.get():
    _bindings.set_eager(True)
if _config.XLA_AHEAD.get():
    from torch_xla.debug._ahead import command as _ahead

    _ahead.watch_from_environment()
if _config.XLA_USE_AS_ACCELERATOR.get():
    experimental.use_as_accelerator()
