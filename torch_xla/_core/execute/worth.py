"""Whether a program of a graph is worth its compile, from the graph alone: counts and sizes, never a clock.

Running op by op calls PyTorch's kernels, and a program calls the same ones for convolutions, sorting and the like, but
from XLA's threads, which hand each to the thread that divides it. What a program saves is among the other operators:
the calls themselves, and passes over memory. ResNet-18's step is mostly convolutions and is not compiled; GPT-2's is.
"""

from __future__ import annotations

import functools
import math

import jax

from torch_xla._core.graph.graph import Graph, Node, fill_template
from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.call import find_overload
from torch_xla.ops.registry import Meta

# What two cores do in a second, and an operator's call; what counts is how they relate.
_MULTIPLICATIONS = 60e9
_BYTES = 16e9
_CALL = 4e-6
_KERNELS = 0.4  # of the time of all others, from which on a program saves less than it loses
# XLA takes tens of milliseconds to compile an operator, and a program that only saves calls makes up for that in
# thousands of runs: a graph of such runs (operators / 64) squared times before it is compiled.
SMALL = 64


def runs_before(graph: Graph) -> float:
    """How often a graph runs op by op before it is compiled; infinite where a program would not be faster."""
    kernels = memory = 0.0
    for node in graph.nodes:
        inputs = [graph.meta(edge) for edge in node.inputs]
        work = _work(node, inputs)
        kernels += work / _MULTIPLICATIONS
        if not (work or _is_view(node.op)):
            memory += sum(math.prod(m.shape) * m.dtype.itemsize for m in (*inputs, *node.outs) if m) / _BYTES
    calls = len(graph.nodes) * _CALL
    if kernels >= _KERNELS * (memory + calls):
        return math.inf
    return float((len(graph.nodes) // SMALL) ** 2) * calls / (memory + calls)


def _work(node: Node, inputs: list[Meta | None]) -> int:
    if node.op not in host_kernel.OPERATORS:
        return 0
    arrays = [m and jax.ShapeDtypeStruct(m.shape, dtypes.numpy_dtype(m.dtype)) for m in inputs]
    return host_kernel.work(node.op, fill_template(node, arrays, lambda number: number.value))


@functools.cache
def _is_view(name: str) -> bool:
    returns = find_overload(name)._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
