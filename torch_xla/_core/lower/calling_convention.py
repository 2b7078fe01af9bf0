"""Maps a graph's leaves and outputs to the flat inputs and results of its program.

`w -= lr * g` takes buffers `w` and `g` and a vector `[lr]`, and gives a new `w`. Inputs are the leaves in no pack, one
buffer per pack of leaves, and one vector per type of number. Results are one buffer per pack with outputs (stacks, then
packs that are updated in place, then packs of new values), the outputs in no pack, and, in a program to be executed, a
token: a caller waits for that, since the next program may overwrite the other results. There are packs because each
buffer costs a client as much as a copy of kilobytes, and stacks because a loop over layers reads arrays of members.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla import _bindings
from torch_xla._core.device import shardings
from torch_xla._core.graph.graph import Edge, Edges, Graph
from torch_xla._core.lower import manual_lowering
from torch_xla.ops import dtypes

# Which vector a number of this type travels in; None is a word of a seed.
_VECTORS = {float: 0, int: 1, complex: 2, None: 3}

Numbers = list[Any]


class ProgramSignature:
    """Maps a graph's leaves and outputs to the flat inputs and results of its program.

    Per input, `buffers` has shape and dtype and `places` the placement number. Per result, `result_buffers` has shape
    and placement number. `aliases` maps each donated input to the result that takes over its buffer, or to None if none
    does. `input_packs` and `result_packs` are the edges in each pack among the inputs and the results, `singles` those
    of the results in no pack. `index_value` makes of an index into a buffer what is fastest on the platform: a run-time
    value on CPUs, elsewhere a constant.
    """

    def __init__(self, graph: Graph, token: bool = False, platform: str = "cpu") -> None:
        self._token = token
        # As a value, a layer's place is no part of the kernels that read from it: XLA:CPU compiles equal ones once.
        # Others read such a value back to the host, before each product of matrices that takes a part of a pack.
        self.index_value: Callable[[int], Any] = _as_value if platform == "cpu" else int
        self._leaves = graph.leaves
        self._packs = [leaves for leaves, _ in graph.packs if leaves]
        self._stacks = {leaves for leaves, _ in graph.packs[: graph.stacks]}
        packed = {leaf for leaves in self._packs for leaf in leaves}
        self._singles = [i for i in range(len(graph.leaves)) if i not in packed]
        self.input_packs = [tuple(Edge(True, leaf, 0) for leaf in leaves) for leaves in self._packs]

        packed_outputs = {output for _, outputs in graph.packs for output in outputs}
        single = [i for i in range(len(graph.outputs)) if i not in packed_outputs]
        edges = [Edge(False, *output) for output in graph.outputs]
        self.result_packs = [tuple(edges[i] for i in outputs) for _, outputs in graph.packs if outputs]
        stacks = graph.packs[: graph.stacks]
        self.stack_edges = {tuple(Edge(True, leaf, 0) for leaf in leaves) for leaves, _ in stacks if leaves}
        self.stack_edges |= {tuple(edges[i] for i in outputs) for _, outputs in stacks if outputs}
        self.singles = [edges[i] for i in single]
        self._sizes = _vector_sizes(graph)

        self.buffers: list[tuple[tuple[int, ...], Any]] = [
            (graph.leaves[i].shape, dtypes.numpy_dtype(graph.leaves[i].dtype)) for i in self._singles
        ]
        for leaves in self._packs:
            first = graph.leaves[leaves[0]]
            shape: tuple[int, ...] = (sum(math.prod(graph.leaves[i].shape) for i in leaves),)
            if leaves in self._stacks:
                shape = (len(leaves), *first.shape)
            self.buffers.append((shape, dtypes.numpy_dtype(first.dtype)))
        types = map(np.dtype, _bindings.number_types())
        self.buffers += [((n,), dtype) for n, dtype in zip(self._sizes, types, strict=True) if n]

        at = graph.leaf_placements or (shardings.REPLICATED,) * len(graph.leaves)
        to = graph.output_placements or (shardings.REPLICATED,) * len(graph.outputs)
        parts = manual_lowering.find(graph)
        to = tuple(
            shardings.MANUAL if node in parts else number for (node, _), number in zip(graph.outputs, to, strict=True)
        )
        self.places = [at[i] for i in self._singles]
        self.places += [shardings.REPLICATED] * (len(self.buffers) - len(self.places))
        self.result_buffers: list[tuple[tuple[int, ...], int]] = [((0,), shardings.REPLICATED)] * len(self.result_packs)
        self.result_buffers += [(_shape(graph, i), to[i]) for i in single]
        if token:
            self.result_buffers.append(((), shardings.REPLICATED))

        self.aliases = self._aliases(graph, single)
        for slot, result in self.aliases.items():
            if result is not None and not shardings.same(self.places[slot], self.result_buffers[result][1]):
                self.aliases[slot] = None

    def _aliases(self, graph: Graph, single: list[int]) -> dict[int, int | None]:
        inputs = {leaf: i for i, leaf in enumerate(self._singles)}
        results = {output: i for i, output in enumerate(single, len(self.result_packs))}
        aliases: dict[int, int | None] = {}
        for leaf, output in zip(graph.donated, graph.aliased_outputs, strict=True):
            if leaf in inputs:  # several may have one successor, which takes the place of the first
                aliases[inputs[leaf]] = results.pop(output, None) if _fits(graph, leaf, output) else None
        updated = [leaves for leaves, outputs in graph.packs if outputs]
        aliases |= {len(inputs) + k: updated.index(leaves) for k, leaves in enumerate(self._packs) if leaves in updated}
        return aliases

    def arguments(self, inputs: Sequence[Any]) -> tuple[Mapping[int, Any], Numbers]:
        """A value per leaf, and the vectors of numbers, None where there are none."""
        remaining_inputs = iter(inputs)
        leaves = _Leaves(((leaf, next(remaining_inputs)) for leaf in self._singles), self.index_value)
        for members in self._packs:
            if members in self._stacks:
                leaves.unstack(next(remaining_inputs), members)
            else:
                leaves.unpack(next(remaining_inputs), members, [self._leaves[leaf].shape for leaf in members])
        return leaves, [next(remaining_inputs) if n else None for n in self._sizes]

    def packs(self, inputs: Sequence[Any]) -> dict[Edges, Any]:
        """The packs among the inputs, by the edges in them."""
        return dict(zip(self.input_packs, inputs[len(self._singles) :], strict=False))

    def stacks(self, inputs: Sequence[Any]) -> dict[int, tuple[Any, int]]:
        """For each leaf in a stack the array, and the leaf's index there."""
        pack_arrays = zip(self._packs, inputs[len(self._singles) :], strict=False)
        stacks = [(leaves, array) for leaves, array in pack_arrays if leaves in self._stacks]
        return {leaf: (array, i) for leaves, array in stacks for i, leaf in enumerate(leaves)}

    def results(self, value: Callable[[Edge], Any], packs: Mapping[Edges, Any]) -> tuple[Any, ...]:
        """The program's results, made of the values of edges and the packs."""
        results = (*(packs[edges] for edges in self.result_packs), *map(value, self.singles))
        return (*results, jnp.zeros((), bool)) if self._token else results


class _Leaves(dict[int, Any]):
    """Values of leaves. A member of a pack is sliced out at its first use; most of an optimizer's moments have none."""

    def __init__(self, values: Iterable[tuple[int, Any]], index_value: Callable[[int], Any]) -> None:
        super().__init__(values)
        self._index_value = index_value
        self._packed: dict[int, Callable[[], Any]] = {}

    def unpack(self, pack: Any, members: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> None:
        """Adds the members of a pack, which has them end to end."""
        starts = list(itertools.accumulate(map(math.prod, shapes), initial=0))
        layer = _layer(shapes)
        for i, (leaf, shape) in enumerate(zip(members, shapes, strict=True)):
            first = starts[i - i % layer]
            if i % layer == 0:
                index_value = functools.cache(functools.partial(self._index_value, first))
            self._packed[leaf] = functools.partial(_part, pack, index_value, starts[i] - first, shape)

    def unstack(self, array: Any, members: Sequence[int]) -> None:
        """Adds the members of an array of them."""
        for i, leaf in enumerate(members):
            self._packed[leaf] = functools.partial(_member, array, functools.partial(self._index_value, i))

    def __missing__(self, leaf: int) -> Any:
        value = self[leaf] = self._packed[leaf]()
        return value


def _as_value(start: int) -> Any:
    return jax.lax.optimization_barrier(jnp.int32(start))


def _member(array: Any, index_value: Callable[[], Any]) -> Any:
    return jax.lax.dynamic_index_in_dim(array, index_value(), keepdims=False, allow_negative_indices=False)


def _part(pack: Any, index_value: Callable[[], Any], offset: int, shape: tuple[int, ...]) -> Any:
    first, size = index_value(), math.prod(shape)
    if isinstance(first, int):
        part = jax.lax.slice(pack, (first + offset,), (first + offset + size,))
    else:
        start = jax.lax.add(first, np.int32(offset))
        part = jax.lax.dynamic_slice(pack, (start,), (size,), allow_negative_indices=False)
    return jax.lax.reshape(part, shape)


def _layer(shapes: Sequence[tuple[int, ...]]) -> int:
    """The period with which the shapes in a pack repeat (for 90 % of its members), as those of layers do; else 8.

    The members of a period share one start index, because a client takes 0.4 µs for each constant of a program.
    """
    for period in range(4, len(shapes) // 2 + 1):
        again = sum(a == b for a, b in zip(shapes, shapes[period:], strict=False))
        if again >= 0.9 * (len(shapes) - period):
            return period
    return 8


def _shape(graph: Graph, output: int) -> tuple[int, ...]:
    node, result = graph.outputs[output]
    meta = graph.nodes[node].outs[result]
    assert meta is not None
    return meta.shape


def _fits(graph: Graph, leaf: int, output: int) -> bool:
    """Whether an output can be where a leaf was."""
    if output < 0:
        return False
    node, result = graph.outputs[output]
    return graph.nodes[node].outs[result] == graph.leaves[leaf]


def number_indices(graph: Graph) -> list[tuple[tuple[int, int], ...]]:
    """Per node the vector and the index of each of its numbers, words of a seed included."""
    indices = iter(graph.numbers)
    kinds = [[None if n is None else type(n.value) for n in node.number_inputs()] for node in graph.nodes]
    return [tuple((_VECTORS[kind], next(indices)) for kind in node_kinds) for node_kinds in kinds]


def _vector_sizes(graph: Graph) -> list[int]:
    sizes = [0] * len(_VECTORS)
    for places in number_indices(graph):
        for vector, index in places:
            sizes[vector] = max(sizes[vector], index + 1)
    return sizes
