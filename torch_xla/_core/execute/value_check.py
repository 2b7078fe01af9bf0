"""Values that PyTorch refuses: each program's operators run on CPU kernels too, which raise (``XLA_CHECK_VALUES=1``).

A program never raises because of a value: an index beyond a tensor, a division of integers by 0, a source that is too
short (docs/caveats.md). Here all its values are computed, and each operator's CPU kernel is called with those it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_xla import _bindings, _config
from torch_xla._core.device import client, splits, transfer
from torch_xla._core.graph import graph, interpreter, sequence
from torch_xla._core.graph.graph import Graph, Node
from torch_xla._core.lower import lowering
from torch_xla._errors import RefusedValue

ASKED_BY = (_config.XLA_CHECK_VALUES,)

_compiled: dict[tuple[str, tuple[int, ...]], Any] = {}


def before_run(cut: _bindings.Graph) -> None:
    """Looks for values of a graph that PyTorch refuses, where that is asked for.

    A graph with collectives is not looked at: it would run them twice.

    Raises:
        RefusedValue: There is one.
    """
    if not _config.XLA_CHECK_VALUES.get():
        return
    described = graph.describe(cut)
    if any(map(sequence.is_collective, described.nodes)):
        return
    places = [(slot, i) for slot, node in enumerate(described.nodes) for i, m in enumerate(node.outs) if m is not None]
    leaves = [
        transfer.download(location, meta.shape, meta.dtype)
        for location, meta in zip(cut.leaf_locations(), described.leaves, strict=True)
    ]
    key = cut.key, described.numbers
    program = _compiled.get(key) or _compiled.setdefault(key, _program(described, places))
    with client.x64():
        numbers = [transfer.put(vector, cut.device) for vector in cut.packed_numbers() if vector.size]
        computed = program(*(transfer.upload(leaf, cut.device) for leaf in leaves), *numbers)
    results: list[dict[int, torch.Tensor]] = [{} for _ in described.nodes]
    for (slot, i), value in zip(places, computed, strict=True):
        meta = described.nodes[slot].outs[i]
        assert meta is not None
        results[slot][i] = transfer.download((value, -1), meta.shape, meta.dtype)
    for slot, node in enumerate(described.nodes):
        if not node.seeded:
            _check(node, slot, [leaves[w.slot] if w.leaf else results[w.slot][w.result] for w in node.inputs])


def _program(described: Graph, places: Sequence[tuple[int, int]]) -> Any:
    """The graph with all its values as results, in one place each."""
    whole = (splits.WHOLE,) * len(described.leaf_places)
    wanted = (splits.WHOLE,) * len(places) if described.wanted_places else ()
    every = replace(
        described,
        outputs=tuple(places),
        donated=(),
        successors=(),
        packs=(),
        leaf_places=whole,
        wanted_places=wanted,
    )
    with client.x64():
        return lowering.lower(every, "value_check").stage.compile()


def _check(node: Node, slot: int, tensors: list[torch.Tensor]) -> None:
    refusal = _refusal(node, tensors)
    # What is said of all values is about types or layouts, of which XLA takes more.
    if refusal is None or all(_same(refusal, _refusal(node, [like(t) for t in tensors])) for like in _OTHERS):
        return
    where = f"\n  recorded at {node.frame}" if node.frame else ""
    refusal.args = (f"{refusal}{where}",)
    raise RefusedValue(refusal, (slot,))


_OTHERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.zeros_like, torch.ones_like)


def _same(refusal: Exception, other: Exception | None) -> bool:
    return type(other) is type(refusal) and str(other) == str(refusal)


def _refusal(node: Node, tensors: list[torch.Tensor]) -> Exception | None:
    try:
        with torch.no_grad():
            interpreter.call(node, tensors)
    except Exception as error:
        return error
    return None
