"""Path of `torch_xla.core.dynamo_bridge` in torch_xla 2."""

from torch_xla.core.dynamo_bridge import extract_compiled_graph as extract_compiled_graph
