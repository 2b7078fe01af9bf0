"""What `torch.compile(backend="openxla")` of PyTorch calls.

A graph that Dynamo traced is recorded twice, like any other code, and so becomes the program of that code without
`torch.compile`. From then on its calls are replays: nothing is recorded, and the graph is not interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_xla import _bindings
from torch_xla._core import region
from torch_xla._core import sync as _barrier
from torch_xla._core.report import debug_level
from torch_xla._core.untraced import untraced


def extract_compiled_graph(xla_model: torch.fx.GraphModule, xla_args: tuple[Any, ...]) -> Callable[..., Any]:
    """A function that runs a traced graph as one program per call.

    Args:
        xla_model: The graph.
        xla_args: Arguments of the first call; the function takes others of their shapes.
    """
    from torch_xla._core.replay.step import Step  # which imports JAX

    del xla_args
    results: list[torch.Tensor] = []
    recording = False

    def call(*args: Any) -> Any:
        found = xla_model(*args)
        if recording:  # else it is a part of what somebody else records
            results.extend(_tensors(found))
        return found

    @contextmanager
    def enter(observe: Callable[[Any, Any], None], _: bool) -> Iterator[None]:
        nonlocal recording
        eager = _bindings.is_eager()
        _bindings.set_eager(False)  # one program also where all else runs at once
        try:
            with region.entered(region.Region(observe=observe)) as running:
                recording = True
                yield
                running.closing = True
                _barrier.evaluate(results, give=True, cause=debug_level.DYNAMO)
        finally:
            recording = False
            results.clear()
            _bindings.set_eager(eager)

    step = Step(call, "graph", enter, _settle, pure=True)

    @untraced
    def run(*args: Any) -> Any:
        return step(*args)

    return run


def _settle(tensors: Sequence[torch.Tensor]) -> None:
    """Computes what arguments wait for, which is no part of the program: it has one graph only then."""
    if any(_bindings.has_pending(device) for device in {t.device.index for t in tensors if t.device.type == "xla"}):
        _barrier.evaluate([t for t in tensors if t.device.type == "xla"], cause=debug_level.DYNAMO_INPUTS)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and x.device.type == "xla"]
