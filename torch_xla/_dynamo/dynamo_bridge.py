"""Has torch_xla 2's bridge to `torch.compile`, under its name."""

from typing import Any

from torch_xla._errors import message
from torch_xla.core.dynamo_bridge import extract_compiled_graph as extract_compiled_graph
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config as alias_with_buffer_donor_config


class GraphInputMatcher:
    """A name of torch_xla 2, whose objects kept tensors; none is ever made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        got = "got a call of GraphInputMatcher, which torch_xla 2 had for itself"
        raise NotImplementedError(message("dynamo", got, do="call extract_compiled_graph"))
