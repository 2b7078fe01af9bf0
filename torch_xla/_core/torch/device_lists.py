"""Adds ``xla`` to lists of devices in PyTorch's compiler, which has no registration for others.

`torch.compile` without a backend gives graphs of tensors on ``xla`` to ``openxla``: a default can be registered, but
only after the compiler is imported, which takes longer than all else that `import torch_xla` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention


def _is_on_xla(graph: torch.fx.Graph) -> bool:
    values = (node.meta.get("example_value") for node in graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in values)


def _by_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compiled(self: Any, module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if not _is_on_xla(module.graph):
            return original(self, module, inputs, **options)
        from torch_xla._torch_internals import lookup_backend

        return lookup_backend("openxla")(module, inputs)

    return compiled


def _but_on_xla(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate(query: torch.Tensor, *others: torch.Tensor) -> None:
        if query.device.type != "xla":
            original(query, *others)

    return validate


def install() -> None:
    """Wraps what `torch.compile` makes of the name ``"inductor"``, and what says where attention can be computed."""
    kind = torch._TorchCompileInductorWrapper
    kind.__call__ = _by_device(kind.__call__)  # type: ignore[method-assign]
    flex_attention._validate_device = _but_on_xla(flex_attention._validate_device)
