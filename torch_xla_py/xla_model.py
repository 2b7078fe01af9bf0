"""`torch_xla.core.xla_model` under its first name."""

from torch_xla.core.xla_model import *  # noqa: F403
from torch_xla.core.xla_model import __all__ as __all__
