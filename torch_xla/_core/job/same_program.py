"""Programs over the devices of several processes: all must run the same one, with the same numbers and replicas.

XLA does not check that: processes with different programs would compute wrong values. A program is compared before its
first use, and a buffer with parts in several processes each time that it is read.
"""

from __future__ import annotations

import functools
import hashlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_xla import _bindings
from torch_xla._core.device import client, failures, shardings, transfer
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Graph, Node, describe
from torch_xla._core.job import program_starts, session
from torch_xla._core.job.waits import Ranks, Wait, until
from torch_xla.ops.registry import Meta

if TYPE_CHECKING:
    import jax

_compared: set[str] = set()
_settled: dict[Ranks, int] = {}  # how many programs were seen to be the same
_LARGE = 1 << 20  # bytes, of an input whose digest is computed where it is
# By the buffers' numbers: each buffer, and the digests of its parts, or of the tensors that it packs.
_digests: dict[int, tuple[weakref.ref[Any], dict[tuple[str, int], str]]] = {}
_PAUSE, _ASKED_EVERY = 0.0005, 0.01  # seconds


def compare(cut: _bindings.Graph) -> None:
    """Compares a program, with all inputs, that is about to be used for the first time with those of other processes.

    Raises JobError in all of them where they differ.
    """
    connection = session.connection() if cut.key not in _compared else None
    if connection is None or connection.imagined:
        return
    graph = describe(cut)
    purpose = "the first start of a program over all devices"
    entries = list(_entries(graph, cut.packed_numbers()))
    copies = connection.compare(connection.everyone, entries, purpose, dict(_copies(cut)))
    for rank, other in enumerate(copies):
        for before, earlier in enumerate(copies[:rank]):
            differ = next((part for part in other if earlier.get(part, other[part]) != other[part]), None)
            if differ is not None:
                leaf = int(differ.split(" ")[0])
                connection.fail(
                    f"[spmd] ranks {before} and {rank} have other values in what both have a copy of: input {leaf} of "
                    f"a program, {_typed(graph.leaves[leaf])}, made at {graph.leaf_frames[leaf] or 'an unknown line'}; "
                    "give all processes the same, such as by one seed"
                )
    _compared.add(cut.key)


def gather(buffer: Any) -> Callable[[Any], None]:
    """Compares a buffer that is about to be gathered from all processes with what the others are about to gather.

    Gives what takes the result; raises JobError in all of them where they differ.
    """
    connection = session.connection()
    assert connection is not None
    parts = buffer.sharding.shard_shape(buffer.shape)
    text = f"a read of {buffer.dtype}{list(buffer.shape)} in parts of {list(parts)}"
    count, chain = program_starts.so_far(connection.everyone)
    before = f"{count} programs before it, which come to {chain:x}"
    where = _origin()
    entries = [(f"{text}, {transfer.origin_of(buffer)}", where), (before, where)]
    connection.compare(connection.everyone, entries, text)
    return program_starts.start(connection.everyone, text)


def settle() -> None:
    """Checks that the others have started the same programs, before Python gets a value that they took part in.

    A program that was compared once is not compared at its later starts, and by then its values depend on what the
    others sent. Raises JobError in all processes where they differ.
    """
    connection = session.connected()
    new = {ranks: count for ranks, count in program_starts.counts().items() if _settled.get(ranks) != count}
    if connection is None or connection.imagined or not new:
        return
    own_rank, ranks = connection.rank_info.rank, next(iter(new))
    wait = Wait(ranks, "a read", new[ranks], place=program_starts.PLACE, started=new[ranks])
    missing = {(ranks, rank) for ranks in new for rank in ranks if rank != own_rank}
    request_time = time.monotonic()

    def same() -> bool | None:
        nonlocal missing, request_time
        connection.check()
        reports = {rank: connection.read(f"ran/{rank}") for rank in {rank for _, rank in missing}}
        for rank, text in reports.items():
            if (difference := program_starts.difference(text, rank, own_rank)) is not None:
                connection.fail(difference)
        missing = {(by, rank) for by, rank in missing if program_starts.started_by(reports[rank], by) < new[by]}
        if missing and time.monotonic() - request_time > _ASKED_EVERY:
            connection.store.add("news", 1)
            request_time = time.monotonic()
        return None if missing else True

    with connection.asking():
        connection.publish("ran", program_starts.report)
        with connection.waiting(wait):
            until(same, _PAUSE)
    _settled.update(new)


def _typed(meta: Meta) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"


def _origin() -> str:
    """The origin of what is run, in words, if the line that recorded it is unknown."""
    return f"run at {_bindings.user_frame()}; XLA_IR_DEBUG=1 tells lines"


def _entries(graph: Graph, vectors: Sequence[Any]) -> Iterator[sequence.Entry]:
    """The entries that must be equal in all processes, in order."""
    origin = _origin()

    def where(frame: str | None) -> str:
        return f"recorded at {frame}" if frame else origin

    for i, meta in enumerate(graph.leaves):
        parts = shardings.text_of(graph.leaf_placements[i]) or "whole"
        yield f"a program with input {i}, {_typed(meta)}, {parts}", where(graph.leaf_frames[i])
    start = 0
    for node in graph.nodes:
        end = start + len(node.number_inputs())
        yield _node(node, graph.numbers[start:end], vectors), where(node.frame)
        start = end
    result_places = [shardings.text_of(number) for number in graph.output_placements]
    results = f"the results {list(graph.outputs)} {result_places}, over inputs {list(graph.donated)}"
    yield f"a program with {results}", origin


def _node(node: Node, places: Sequence[int], vectors: Sequence[Any]) -> str:
    inputs = [(w.leaf, w.slot, w.result) for w in node.inputs]
    types = ", ".join(_typed(meta) for meta in node.outs if meta is not None)
    seed = f" with seed {[int(vectors[3][place]) for place in places[-2:]]}" if node.seeded else ""
    return f"{node.op} {[*node.args, *inputs]} -> {types}{seed}"


def _copies(cut: _bindings.Graph) -> Iterator[tuple[str, str]]:
    """A digest of each part of an input that other processes have too."""
    metas = cut.leaf_metas
    for leaf, (buffer, start) in enumerate(cut.leaf_locations()):
        failures.finish(buffer)
        shape = buffer.shape
        holders: dict[str, set[int]] = {}
        for device, where in buffer.sharding.devices_indices_map(shape).items():
            holders.setdefault(str(where), set()).add(device.process_index)
        hashed_parts: set[str] = set()
        for shard in buffer.addressable_shards:
            part = str(shard.index)
            if part in hashed_parts or len(holders[part]) == 1:
                continue
            hashed_parts.add(part)
            length = math.prod(metas[leaf][0]) if start >= 0 else None
            yield f"{leaf} {part}", _digest(buffer, part, shard.data, start, length)


def _digest(buffer: Any, part: str, values: Any, start: int, length: int | None) -> str:
    """A digest of a part of a buffer, or of a tensor in a pack, made once."""
    known = _digests.get(id(buffer))
    if known is None or known[0]() is not buffer:
        number = id(buffer)
        known = _digests[number] = weakref.ref(buffer, lambda _: _digests.pop(number, None)), {}
    key = part, start
    if key not in known[1]:
        if values.nbytes < _LARGE:  # for one of each size a program would take longer
            elements = ... if length is None else slice(start, start + length)
            with transfer.viewing(values):
                data = np.asarray(values)[elements].tobytes()
            known[1][key] = hashlib.blake2b(data, digest_size=16).hexdigest()
        else:
            with client.x64():
                known[1][key] = np.asarray(_sums()(values, max(start, 0), length)).tobytes().hex()
    return known[1][key]


@functools.cache
def _sums() -> Any:
    """A program that reads all of an array and gives 16 bytes: sums of what its words and their places come to."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def sums(values: jax.Array, start: int, length: int | None) -> jax.Array:
        if length is not None:
            values = lax.dynamic_slice(values, (start,), (length,))
        if jnp.iscomplexobj(values):
            values = jnp.stack((values.real, values.imag))
        if values.dtype == bool:
            values = values.astype(jnp.uint8)
        words = lax.bitcast_convert_type(values, f"uint{8 * min(values.dtype.itemsize, 4)}").reshape(-1)
        places = lax.iota(jnp.uint32, words.size)
        results = []
        for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F):
            mixed = (words.astype(jnp.uint32) ^ (places * jnp.uint32(factor))) * jnp.uint32(0x85EBCA6B)
            mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
            results.append((mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32))
        return jnp.stack(results)

    return jax.jit(sums, static_argnums=2)
