"""Describes a collective as text, the argument of the recorded operator, without JAX."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NAME = "xla.collective.default"

# By name: PyTorch's number of it, and StableHLO's operation.
REDUCTIONS = {
    "sum": (0, "add"),
    "mul": (2, "multiply"),
    "min": (3, "minimum"),
    "max": (4, "maximum"),
    "and": (5, "and_"),
    "or": (6, "or_"),
    "xor": (7, "xor"),
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute")

Groups = tuple[tuple[int, ...], ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """The description of a collective.

    All have as many results as inputs, and a number that is there once it has run. ``all_gather`` gives ``(size,
    *shape)``, ``reduce_scatter`` takes that and gives ``shape``, ``all_to_all`` takes and gives it; the others keep the
    shape.
    """

    kind: str  # one of `KINDS`
    groups: Groups  # who work among themselves: each process of the job is in one
    reduction: str = ""  # one of `REDUCTIONS`, where something is reduced
    root: int = 0  # whose values a ``broadcast`` gives, as its place in the group
    pairs: tuple[tuple[int, int], ...] = ()  # (source, target) of a ``permute``

    def text(self) -> str:
        """The call as the operator's argument."""
        return json.dumps([self.kind, self.groups, self.reduction, self.root, self.pairs], separators=(",", ":"))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group of a process."""
        return next(group for group in self.groups if rank in group)

    def shape_of_result(self, shape: Shape, rank: int) -> Shape:
        """The shape of a result in a process, from that of the input."""
        if self.kind == "all_gather":
            return (len(self.group_of(rank)), *shape)
        return shape[1:] if self.kind == "reduce_scatter" else shape

    def attributes(self, ahead: Sequence[int]) -> dict[str, Any]:
        """What the kernel of the host is told (`csrc/run/collective_kernel`).

        `ahead` has the numbers of this call and of those that its group runs next, or none where it was announced.
        """
        return {
            "kind": self.kind,
            "groups": [rank for group in self.groups for rank in group],
            "sizes": [len(group) for group in self.groups],
            "ahead": list(ahead),
            "reduction": REDUCTIONS[self.reduction][0] if self.reduction else 0,
            "root": self.root,
            "sources": [source for source, _ in self.pairs],
            "targets": [target for _, target in self.pairs],
        }

    def __str__(self) -> str:
        return f"{self.kind}({self.reduction})" if self.reduction else self.kind


def by_dtype(dtypes: Sequence[Any]) -> list[list[int]]:
    """The places of each dtype's values: the host's kernel takes the values of one after those of the other."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return [[i for i, name in enumerate(names) if name == which] for which in sorted(set(names))]


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Call:
    """Parses the result of `Call.text`."""
    kind, groups, reduction, root, pairs = json.loads(text)
    return Call(kind, tuple(map(tuple, groups)), reduction, root, tuple(map(tuple, pairs)))
