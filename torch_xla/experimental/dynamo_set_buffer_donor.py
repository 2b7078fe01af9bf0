"""Once registered ``torch.ops.xla.dynamo_set_buffer_donor_``, which `torch_xla.core.xla_model` does now."""

from torch_xla._deprecation import warn_once
from torch_xla.core import xla_model as xla_model

warn_once(__name__, "torch_xla", extra_msg="The operator is registered without it")
