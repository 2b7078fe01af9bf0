"""Gives fake tensors on ``xla`` the current device's index, with which `torch.compile` and `torch.export` trace.

PyTorch does so for the types in a list of its own, and lets only an implementation of the calls be registered.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._torch_internals import OpOverload, op_implementations_checks


@functools.cache
def _takes_device(op: OpOverload) -> bool:
    return any(str(argument.type) in ("Device", "Optional[Device]") for argument in op._schema.arguments)


def _with_index(value: Any) -> Any:
    if not isinstance(value, torch.device) or value.type != "xla":
        return value
    return torch.device(
        "xla", _bindings.current_device() if value.index is None else _bindings.known_index(value.index)
    )


def _on_current_device(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    indexed = tuple(map(_with_index, args)), {name: _with_index(value) for name, value in kwargs.items()}
    if indexed == (args, kwargs):
        return NotImplemented
    with mode:
        return op(*indexed[0], **indexed[1])


def install() -> None:
    """Registers the implementation before PyTorch's of the same calls, of which the first is taken."""
    op_implementations_checks.insert(0, (_takes_device, _on_current_device))
