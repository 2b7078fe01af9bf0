"""The arguments of a call of a step: which are tensors, and what tells one kind from others."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla import _bindings

_NUMBERS = (bool, int, float, complex)
_PLAIN = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
_FLAT = (torch.Tensor, *_PLAIN)


class CannotReplay(Exception):
    """A step does something that a replay of it would not.

    Args:
        reason: What.
        first: Whether that counts in a first call too, in which much is made that stays.
    """

    def __init__(self, reason: str, first: bool = True) -> None:
        super().__init__(reason)
        self.first = first


@dataclass
class Call:
    """The arguments of one call, flat.

    Attributes:
        tensors: The tensors among them; of some views a copy.
        key: All else about them: structure, shapes, dtypes, other values.
        numbers: The numbers, which are a part of the key.
        own: Those views, by position.
    """

    tensors: list[torch.Tensor]
    key: Any
    numbers: tuple[Any, ...] = ()
    own: dict[int, torch.Tensor] = field(default_factory=dict)

    def settle_views(self, moving: dict[int, int | None]) -> None:
        """Has the key tell how views among the tensors show their storages, and which share one.

        Args:
            moving: How each did in earlier calls, by position; None for one that is not always the same part of its
                storage, of which a copy is taken.
        """
        shared = _bindings.describe_sharing(self.tensors)
        if not shared:
            return
        for i, shown, first in shared:
            if moving.setdefault(i, shown) != shown:
                moving[i] = None
            if moving[i] is None and first == i and not self.tensors[i].requires_grad:
                self.own[i] = self.tensors[i]
                self.tensors[i] = self.tensors[i].detach().clone()
        self.key = (self.key, tuple(entry for entry in shared if entry[0] not in self.own))

    def given(self, i: int) -> torch.Tensor:
        """A tensor as it was passed."""
        return self.own[i] if i in self.own else self.tensors[i]

    def write_back(self) -> None:
        """Copies what was written to copies.

        Raises:
            CannotReplay: Something was.
        """
        written = [i for i in self.own if self.tensors[i]._version > 0]
        with torch.no_grad():
            for i in written:
                self.own[i].copy_(self.tensors[i])
        if written:
            raise CannotReplay("it writes to an argument that is a view; pass the whole tensor")

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flattens arguments."""
        leaves: Sequence[Any] = args
        spec: Any = None
        if kwargs or not all(isinstance(x, _FLAT) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors: list[torch.Tensor] = []
        numbers: list[Any] = []
        key: list[Any] = [spec]
        for x in leaves:
            if isinstance(x, torch.Tensor):
                tensors.append(x)
                key.append((x.shape, x.dtype, x.stride(), x.requires_grad, x.device, type(x)))
            elif type(x) in _NUMBERS:
                # Told by its text, as 1, 1.0 and True are equal, and 0.0 and -0.0.
                numbers.append((type(x), repr(x)))
                key.append(type(x))
            elif isinstance(x, enum.Enum) or type(x) in _PLAIN:
                key.append((type(x), x))
            else:
                raise CannotReplay(
                    f"it is given a {type(x).__name__}; give it tensors, numbers, strings and containers of them"
                )
        return Call(tensors, tuple(key), tuple(numbers))
