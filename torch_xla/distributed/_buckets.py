"""Batches of any length as batches of a few: each length of a batch has a program of its own."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from torch_xla._errors import message
from torch_xla.utils import utils as xu

Number = int | float | bool


@dataclass(frozen=True)
class Buckets:
    """The lengths to which batches are padded, and the value to pad with.

    The length of a batch is that of its first tensor that has the dimension. It and all others of that length there are
    padded at the end to the next size.

    Attributes:
        sizes: The lengths that batches are to have, or one for all.
        dim: The dimension that is padded: 1 for sequences, 0 for a last batch that is smaller.
        value: What is put in.
        values: What is put into some tensors instead, by key of a batch that is a dict, or position in one that is a
            list or a tuple: ``{"labels": -100}``.
        mask: A key under which a batch that is a dict gets a mask, bool, with True where there was something, of the
            shape of the first padded tensor up to the dimension. A list or a tuple gets it as its last element, under
            any key. A mask that the batch has already is padded with zeros like the rest.

    Example::

        MpDeviceLoader(loader, "xla", pad_to=Buckets([64, 128, 256], values={"labels": -100}, mask="mask"))
    """

    sizes: Sequence[int] | int
    dim: int = 1
    value: Number = 0
    values: Mapping[Any, Number] = field(default_factory=dict)
    mask: Any = None

    def __post_init__(self) -> None:
        sizes = [self.sizes] if isinstance(self.sizes, int) else sorted(self.sizes)
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(message("loader", f"pad_to={self.sizes}", expected="lengths of 1 or more"))
        if self.dim < 0:
            raise ValueError(
                message("loader", f"dim={self.dim} of pad_to", expected="0 or more; tensors differ in their last ones")
            )
        object.__setattr__(self, "sizes", tuple(sizes))

    def size_for(self, length: int) -> int:
        """The size that a length becomes.

        Args:
            length: Of a batch.

        Raises:
            ValueError: It is longer than all sizes.
        """
        assert not isinstance(self.sizes, int)
        place = bisect.bisect_left(self.sizes, length)
        if place == len(self.sizes):
            raise ValueError(
                message(
                    "loader",
                    f"a batch of length {length} in dimension {self.dim}",
                    expected=f"at most {self.sizes[-1]}, the largest size of pad_to",
                    do="add a size, or cut the batch in the collate function",
                )
            )
        return self.sizes[place]

    def pad(self, batch: Any) -> Any:
        """A batch of one of the sizes; the batch itself where it has that already and wants no mask.

        Args:
            batch: CPU tensors, nested in lists, tuples, dicts and dataclasses.
        """
        tensors: list[torch.Tensor] = []
        xu.for_each_instance(batch, self._is_long, tensors.append)
        if not tensors:
            return batch
        length = tensors[0].shape[self.dim]
        more = self.size_for(length) - length
        padded = self._padded(batch, length, more) if more else batch
        return padded if self.mask is None else self._with_mask(padded, tensors[0], length, more)

    def _is_long(self, part: Any) -> bool:
        return isinstance(part, torch.Tensor) and part.dim() > self.dim

    def _padded(self, batch: Any, length: int, more: int) -> Any:
        def longer(key: Any, part: Any) -> Any:
            def pad(tensor: torch.Tensor) -> torch.Tensor:
                room = [0, 0] * (tensor.dim() - self.dim - 1) + [0, more]
                return functional.pad(tensor, room, value=self.values.get(key, self.value))

            return xu.for_each_instance_rewrite(part, lambda x: self._is_long(x) and x.shape[self.dim] == length, pad)

        # Key by key: what is padded with several values may be one tensor.
        if isinstance(batch, Mapping):
            return _like_mapping(batch, {key: longer(key, part) for key, part in batch.items()})
        if isinstance(batch, (list, tuple)):
            items = [longer(i, part) for i, part in enumerate(batch)]
            return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
        if is_dataclass(batch) and not isinstance(batch, type):
            return replace(batch, **{each.name: longer(each.name, getattr(batch, each.name)) for each in fields(batch)})
        return longer(None, batch)

    def _with_mask(self, batch: Any, first: torch.Tensor, length: int, more: int) -> Any:
        mask = torch.zeros(*first.shape[: self.dim], length + more, dtype=torch.bool)
        mask[..., :length] = True
        if isinstance(batch, Mapping):
            return _like_mapping(batch, {**batch, self.mask: mask})
        if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
            return type(batch)([*batch, mask])
        if isinstance(batch, torch.Tensor):
            return batch, mask
        raise ValueError(
            message(
                "loader",
                f"a batch of {type(batch).__name__}, to which pad_to is to add a mask",
                expected="a dict, a list, a tuple or a tensor",
                do="have the collate function make the mask",
            )
        )


def _like_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind: a transformers batch is asked for its attributes."""
    if type(like) is dict:
        return items
    mapping: Any = copy.copy(like)
    for key, value in items.items():
        mapping[key] = value
    return mapping


class Wrapper:
    """A wrapper of a loader: other public names are looked up on the loader."""

    _loader: Any

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Only names that are not found otherwise come here; private ones are this object's own.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)


class Padded(Wrapper):
    """A loader whose batches are padded, by whoever reads them."""

    def __init__(self, loader: Any, buckets: Buckets) -> None:
        self._loader = loader
        self._buckets = buckets

    def __iter__(self) -> Iterator[Any]:
        return map(self._buckets.pad, iter(self._loader))


def buckets_of(pad_to: Any) -> Buckets:
    """The `Buckets` of a loader's `pad_to`, which may be their sizes alone."""
    return pad_to if isinstance(pad_to, Buckets) else Buckets(pad_to)
