"""Has torch_xla 2's bridge to `torch.compile`, under its name."""

from torch_xla.core.dynamo_bridge import extract_compiled_graph as extract_compiled_graph
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config as alias_with_buffer_donor_config
