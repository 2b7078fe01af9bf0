"""The calling convention: which buffers a program takes and gives.

It takes the leaves that travel alone, then a buffer per pack of small leaves, then one vector per type of number. It
gives those packs again, then packs of new values, then the outputs that travel alone, and last, if it is to be started,
a token to wait for: the others may be overwritten by the next program while someone waits. A client's cost per buffer
is that of copying kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from torch_xla._core.graph import Graph
from torch_xla.ops import dtypes

# Which vector a number of this type travels in, and the vectors' dtypes.
_VECTORS = {float: 0, int: 1, complex: 2}
_VECTOR_DTYPES = (np.float64, np.int64, np.complex128)

Numbers = tuple[Any, Any, Any]


class Convention:
    """Between a graph's leaves and outputs and the flat buffers of its program.

    Attributes:
        buffers: Shape and dtype of each input.
        aliases: For each input that the program may overwrite the result that takes its place, or None.
    """

    def __init__(self, graph: Graph, token: bool = False) -> None:
        self._token = token
        self._leaves = graph.leaves
        self._packs = [leaves for leaves, _ in graph.packs if leaves]
        packed = {leaf for leaves in self._packs for leaf in leaves}
        self._singles = [i for i in range(len(graph.leaves)) if i not in packed]
        packed_outputs = {output for _, outputs in graph.packs for output in outputs}
        # An output, or those of a pack.
        self._results: list[int | tuple[int, ...]] = [
            *(outputs for _, outputs in graph.packs),
            *(i for i in range(len(graph.outputs)) if i not in packed_outputs),
        ]
        self._sizes = _vector_sizes(graph)

        self.buffers: list[tuple[tuple[int, ...], Any]] = [
            (graph.leaves[i].shape, dtypes.numpy_dtype(graph.leaves[i].dtype)) for i in self._singles
        ]
        for leaves in self._packs:
            size = sum(math.prod(graph.leaves[i].shape) for i in leaves)
            self.buffers.append(((size,), dtypes.numpy_dtype(graph.leaves[leaves[0]].dtype)))
        self.buffers += [((n,), dtype) for n, dtype in zip(self._sizes, _VECTOR_DTYPES, strict=True) if n]

        self.aliases = self._aliases(graph)

    def _aliases(self, graph: Graph) -> dict[int, int | None]:
        inputs = {leaf: i for i, leaf in enumerate(self._singles)}
        results = {result: i for i, result in enumerate(self._results)}
        aliases: dict[int, int | None] = {}
        for leaf, output in zip(graph.donated, graph.successors, strict=True):
            if leaf in inputs:  # several may have one successor, which takes the place of the first
                aliases[inputs[leaf]] = results.pop(output, None) if _fits(graph, leaf, output) else None
        donated = set(graph.donated)
        aliases |= {len(inputs) + k: k for k, leaves in enumerate(self._packs) if donated & set(leaves)}
        return aliases

    def arguments(self, inputs: Sequence[Any]) -> tuple[list[Any], Numbers]:
        """A value per leaf, and the vectors of numbers, None where there are none."""
        given = iter(inputs)
        values: list[Any] = [None] * len(self._leaves)
        for leaf in self._singles:
            values[leaf] = next(given)
        for leaves in self._packs:
            pack, start = next(given), 0
            for leaf in leaves:
                shape = self._leaves[leaf].shape
                end = start + math.prod(shape)
                values[leaf] = pack[start:end].reshape(shape)
                start = end
        floats, ints, complexes = (next(given) if n else None for n in self._sizes)
        return values, (floats, ints, complexes)

    def results(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """What the program returns for a value per output."""
        results = tuple(
            outputs[result] if isinstance(result, int) else jnp.concatenate([outputs[i].reshape(-1) for i in result])
            for result in self._results
        )
        return (*results, jnp.zeros((), bool)) if self._token else results


def _fits(graph: Graph, leaf: int, output: int) -> bool:
    """Whether an output can be where a leaf was."""
    if output < 0:
        return False
    node, result = graph.outputs[output]
    return graph.nodes[node].outs[result] == graph.leaves[leaf]


def number_places(graph: Graph) -> list[tuple[int, int]]:
    """Vector and index of each number of the nodes, seed and offset included."""
    numbers = [number for node in graph.nodes for number in node.number_inputs()]
    kinds = [int if number is None else type(number.value) for number in numbers]
    return [(_VECTORS[kind], index) for kind, index in zip(kinds, graph.numbers, strict=True)]


def _vector_sizes(graph: Graph) -> list[int]:
    sizes = [0] * len(_VECTOR_DTYPES)
    for vector, index in number_places(graph):
        sizes[vector] = max(sizes[vector], index + 1)
    return sizes
