"""Marks around what shall be one StableHLO composite: ``torch.ops.xla.mark_tensor``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla.core.xla_model import XLA_LIB


@torch.compiler.assume_constant_result
def serialize_composite_attr(attr: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """Attributes of a composite as ``mark_tensor`` takes them.

    Args:
        attr: By name strings, numbers, truth values, or lists of numbers or truth values of one type.

    Raises:
        ValueError: Something else is among them.
    """
    if attr is None:
        return None
    if not isinstance(attr, Mapping):
        raise ValueError(message("mark_tensor", f"got attributes {attr!r}", expected="a dictionary"))
    for name, value in attr.items():
        kinds = {type(x) for x in value} if isinstance(value, (list, tuple)) else {type(value)}
        allowed = (int, float, bool) if isinstance(value, (list, tuple)) else (int, float, bool, str)
        if not isinstance(name, str) or len(kinds) != 1 or not kinds.issubset(allowed):
            expected = "names with strings, numbers, truth values, or lists of numbers or truth values"
            raise ValueError(message("mark_tensor", f"got an attribute {name!r}: {value!r}", expected=expected))
    return tuple(attr.items())


@torch.compiler.assume_constant_result
def deserialize_composite_attr(attr: tuple[tuple[str, Any], ...] | None) -> dict[str, Any] | None:
    """The attributes again."""
    return None if attr is None else dict(attr)


def _mark(x: torch.Tensor, name: str, pos: int, id: str, is_input: bool, attr: Any = None) -> torch.Tensor:
    attributes = serialize_composite_attr(deserialize_composite_attr(attr)) or ()
    result: torch.Tensor = torch.ops.xla.mark_boundary(x, name, pos, id, is_input, json.dumps(dict(attributes)))
    return result


def _let_through(x: torch.Tensor, *mark: Any) -> torch.Tensor:
    return x


def _same_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return grad, None, None, None, None, None


XLA_LIB.define("mark_tensor(Tensor x, str name, int pos, str id, bool is_input, Any? attr=None) -> Tensor")
XLA_LIB.impl("mark_tensor", _mark, "XLA")
XLA_LIB.impl("mark_tensor", _let_through, "CompositeExplicitAutograd")
XLA_LIB.impl("mark_tensor", lambda x, *_: torch.empty_like(x), "Meta")
torch.library.register_autograd("xla::mark_tensor", _same_gradient, lib=XLA_LIB)
