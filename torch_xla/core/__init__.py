"""Public path of `torch_xla.core.xla_model`."""

from torch_xla.core import xla_model as xla_model
