"""`torch_xla.core.xla_model` under its first name."""

from torch_xla.core._collectives import fetch_gradients as _fetch_gradients  # noqa: F401
from torch_xla.core.xla_model import *  # noqa: F403
from torch_xla.core.xla_model import _maybe_convert_to_cpu as _maybe_convert_to_cpu
