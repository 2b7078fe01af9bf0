"""What `torch.compile(backend="openxla")` of PyTorch calls.

A graph that Dynamo traced is recorded at each call, and the recorder finds the compiled program by its key. Recording
costs about a microsecond per operation; the program is that of the same code without `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_xla import _bindings
from torch_xla._core import sync as _barrier
from torch_xla._core.report import debug_level


def extract_compiled_graph(xla_model: torch.fx.GraphModule, xla_args: tuple[Any, ...]) -> Callable[..., Any]:
    """A function that runs a traced graph as one program per call.

    Args:
        xla_model: The graph.
        xla_args: Arguments of the first call; the function takes others of their shapes.
    """
    del xla_args

    def run(*args: Any) -> Any:
        # What the arguments wait for is no part of this program, which has one graph only then.
        _barrier.evaluate(_tensors(args), cause=debug_level.DYNAMO_INPUTS)
        _bindings.suspend_eager(True)  # one program also where all else runs at once
        try:
            results = xla_model(*args)
        finally:
            _bindings.suspend_eager(False)
        _barrier.evaluate(_tensors(results), give=True, cause=debug_level.DYNAMO)
        return results

    return run


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and x.device.type == "xla"]
