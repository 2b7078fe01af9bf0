"""Programs over the devices of several processes: all run the same one, with the same numbers and the same copies.

XLA does not look: with others each process would compute something else. They are compared before the first use.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch_xla import _bindings
from torch_xla._core.device import splits, transfer
from torch_xla._core.graph.graph import Graph, Node, describe
from torch_xla._core.job import session
from torch_xla.ops.registry import Meta

_Entry = tuple[str, str | None]  # what is compared, and the user's line of it

_compared: set[str] = set()


def compare(cut: _bindings.Graph) -> None:
    """Compares a program that is about to be used for the first time with those of the other processes.

    Args:
        cut: What is to run, with all its inputs.

    Raises:
        JobError: They differ, in all processes.
    """
    connection = session.session() if cut.key not in _compared else None
    if connection is None:
        return
    graph = describe(cut)
    entries = list(_entries(graph, cut.packed_numbers()))
    digest = hashlib.sha256("\n".join(text for text, _ in entries).encode()).hexdigest()
    copies = dict(_copies(cut))
    everyone = connection.everyone
    said = json.dumps([digest, copies]).encode()
    found = [json.loads(text) for text in connection.meet("program", everyone, said)]
    if any(other != found[0][0] for other, _ in found):
        told = json.dumps(entries).encode()
        connection.fail(_first_difference([json.loads(text) for text in connection.meet("text", everyone, told)]))
    for rank, (_, other) in enumerate(found):
        for before, (_, known) in enumerate(found[:rank]):
            differ = next((part for part in other if known.get(part, other[part]) != other[part]), None)
            if differ is not None:
                leaf = int(differ.split(" ")[0])
                connection.fail(
                    f"[spmd] ranks {before} and {rank} have other values in what both have a copy of: input {leaf} of "
                    f"a program, {_typed(graph.leaves[leaf])}, made at {graph.leaf_frames[leaf] or 'an unknown line'}; "
                    "give all processes the same, such as by one seed"
                )
    _compared.add(cut.key)


def _typed(meta: Meta) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"


def _entries(graph: Graph, vectors: Sequence[Any]) -> Iterator[_Entry]:
    """What the processes have to have in common, in order."""
    for i, meta in enumerate(graph.leaves):
        where = splits.text_of(graph.leaf_places[i]) or "whole"
        yield f"an input {_typed(meta)}, {where}", graph.leaf_frames[i]
    start = 0
    for node in graph.nodes:
        end = start + len(node.number_inputs())
        yield _node(node, graph.numbers[start:end], vectors), node.frame
        start = end
    wanted = [splits.text_of(number) for number in graph.wanted_places]
    yield f"the results {list(graph.outputs)} {wanted}, over inputs {list(graph.donated)}", None


def _node(node: Node, places: Sequence[int], vectors: Sequence[Any]) -> str:
    inputs = [(w.leaf, w.slot, w.result) for w in node.inputs]
    types = ", ".join(_typed(meta) for meta in node.outs if meta is not None)
    seed = f" with seed {[int(vectors[1][place]) for place in places[-2:]]}" if node.seeded else ""
    return f"{node.op} {[*node.args, *inputs]} -> {types}{seed}"


def _first_difference(found: Sequence[Sequence[_Entry]]) -> str:
    texts = [[text for text, _ in entries] for entries in found]
    rank = next(rank for rank, own in enumerate(texts) if own != texts[0])
    pairs = enumerate(itertools.zip_longest(texts[0], texts[rank]))
    place = next(i for i, (one, other) in pairs if one != other)
    words = []
    for who in (0, rank):
        text, line = found[who][place] if place < len(found[who]) else ("no more", None)
        words.append(f"rank {who} has {text} (recorded at {line or 'an unknown line'})")
    return f"[spmd] the processes differ in what they run: {', '.join(words)}; XLA_IR_DEBUG=1 tells lines"


def _copies(cut: _bindings.Graph) -> Iterator[tuple[str, str]]:
    """A digest of each part of an input that other processes have too."""
    import numpy as np

    metas = cut.leaf_metas
    for leaf, (buffer, start) in enumerate(cut.leaf_locations()):
        transfer.finish(buffer)
        shape = buffer.shape
        holders: dict[str, set[int]] = {}
        for device, where in buffer.sharding.devices_indices_map(shape).items():
            holders.setdefault(str(where), set()).add(device.process_index)
        seen: set[str] = set()
        for shard in buffer.addressable_shards:
            part = str(shard.index)
            if part in seen or len(holders[part]) == 1:
                continue
            seen.add(part)
            values = np.asarray(shard.data)
            if start >= 0:
                values = values[start : start + int(np.prod(metas[leaf][0]))]
            yield f"{leaf} {part}", hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()
