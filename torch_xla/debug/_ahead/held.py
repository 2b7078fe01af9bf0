"""Says of a program that a chip has no memory for what takes it: the values that live together at the peak.

XLA's order is its own, and it tells little of a program that it refuses. This is the order of recording: a view takes
nothing, nor does an elementwise result that one operator alone reads, which XLA makes a part of that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from torch_xla._core.device import placement, shardings
from torch_xla._core.device.memory_stats import kind_of, size_of
from torch_xla._core.graph.graph import Graph, Node
from torch_xla.debug._ahead.report import Held

_MOST = 12
Value = tuple[int, int]  # node and result; a leaf is (-1 - its number, 0)


def over_time(graph: Graph) -> tuple[list[tuple[int, int]], list[Held]]:
    """(operators that were computed, bytes of a chip that live then), and what lives at the peak, largest first.

    Values that are alike are told as one.
    """
    place = placement.of(graph.device)
    parts = len(place.devices) if place.mesh else 1
    alias: dict[Value, Value] = {}
    last: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    for slot, node in enumerate(graph.nodes):
        for edge in node.inputs:
            value = (-1 - edge.slot, 0) if edge.leaf else (edge.slot, edge.result)
            value = alias.get(value, value)
            last[value] = slot
            readers.setdefault(value, []).append(slot)
        if _is_view(node.op) and node.inputs:
            edge = node.inputs[0]
            source = (-1 - edge.slot, 0) if edge.leaf else (edge.slot, edge.result)
            alias[slot, 0] = alias.get(source, source)
    for output in graph.outputs:
        last[alias.get(output, output)] = len(graph.nodes)
    sizes = dict(_sizes(graph, alias, readers, parts))
    ends: dict[int, list[Value]] = {}
    for value, end in last.items():
        ends.setdefault(end, []).append(value)
    donated = {-1 - leaf for leaf in graph.donated}
    total = sum(size for value, size in sizes.items() if value[0] < 0)
    points = [(0, total)]
    for slot, node in enumerate(graph.nodes):
        total += sum(sizes.get((slot, result), 0) for result in range(len(node.outs)))
        points.append((slot + 1, total))
        for value in ends.get(slot, ()):
            if value[0] >= 0 or value[0] in donated:
                total -= sizes.get(value, 0)
    at = max(points, key=lambda point: point[1])[0] - 1
    held = [v for v in sizes if v[0] <= at and (last.get(v, -1) >= at or (v[0] < 0 and v[0] not in donated))]
    return points, _alike(graph, held, sizes, readers, at)


def _sizes(
    graph: Graph, alias: dict[Value, Value], readers: dict[Value, list[int]], parts: int
) -> Iterator[tuple[Value, int]]:
    for i, meta in enumerate(graph.leaves):
        number = graph.leaf_placements[i] if graph.leaf_placements else 0
        tiling = shardings.by_number(number)
        share = len(tiling.order) // tiling.copies if tiling is not None else 1
        yield (-1 - i, 0), size_of(tuple(meta.shape), meta.dtype) // share
    outputs = set(graph.outputs)
    for slot, node in enumerate(graph.nodes):
        for result, out in enumerate(node.outs):
            value = slot, result
            fused = _is_pointwise(node.op) and len(set(readers.get(value, ()))) <= 1 and value not in outputs
            if out is not None and value not in alias and not fused:
                yield value, size_of(tuple(out.shape), out.dtype) // parts


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


def _is_view(name: str) -> bool:
    operator = _operator(name)
    return operator is not None and (operator.is_view or name.startswith("aten._unsafe_view"))


def _is_pointwise(name: str) -> bool:
    operator = _operator(name)
    return operator is not None and torch.Tag.pointwise in operator.tags


def _alike(
    graph: Graph, held: list[Value], sizes: dict[Value, int], readers: dict[Value, list[int]], at: int
) -> list[Held]:
    alike: dict[tuple[str, str, str | None, bool], list[int]] = defaultdict(list)
    for value in held:
        node: Node | None = graph.nodes[value[0]] if value[0] >= 0 else None
        meta = node.outs[value[1]] if node is not None else graph.leaves[-1 - value[0]]
        if meta is None or not sizes[value]:
            continue
        if node is None:
            frames = graph.leaf_frames
            what, line, kept = "an argument", frames[-1 - value[0]] if frames else None, False
        else:
            what = node.op.removesuffix(".default").removeprefix("aten.")
            path = ["*" if part.isdigit() else part for part in (node.scope or "").split("/")]  # layers are one
            what, line = f"{what} of {'/'.join(path)}" if node.scope else what, node.frame
            others = [s for s in readers.get(value, ()) if graph.nodes[s].frame != line]  # not in its own pass
            kept = line is not None and any(s > at or graph.nodes[s].frame is None for s in others)
        alike[kind_of(tuple(meta.shape), meta.dtype), what, line, kept].append(sizes[value])
    largest = sorted(alike.items(), key=lambda row: -sum(row[1]))[:_MOST]
    return [Held(sum(each), *key, len(each)) for key, each in largest]
