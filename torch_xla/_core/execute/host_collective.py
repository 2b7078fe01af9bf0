"""Collectives that run for themselves, by PyTorch's groups.

They do in a graph that runs op by op, and between two programs where those do not span the processes of a job.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_xla import _bindings
from torch_xla._core.compile import interruptible
from torch_xla._core.device import client, failures
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Graph
from torch_xla._core.graph.library import XLA_LIB
from torch_xla._core.job import session
from torch_xla._errors import JobError
from torch_xla.ops import collective, collective_call

Parts = list[tuple[list[int], _bindings.Collective]]


@functools.cache
def is_used() -> bool:
    """Whether collectives run so here: a plugin's client that was told of the job's processes knows its own only."""
    if session.rank_info().world == 1 or client.is_own_cpu() or client.spans_job():
        return False
    # Not where programs have collectives in them: PyTorch's kernels may compute what has a kernel.
    XLA_LIB.impl("collective", _compute, "CPU")
    return True


def of_graph(graph: Graph, rank: int) -> dict[int, Parts]:
    """The collectives of a graph by the positions of their nodes, as `OpByOpRun` takes them."""
    order = collective.Order(sequence.numbers(graph, rank))
    found = {}
    for position, node in enumerate(graph.nodes):
        if sequence.is_collective(node):
            call = collective_call.parse(node.args[1])
            dtypes = [meta.dtype for edge in node.inputs if (meta := graph.meta(edge)) is not None]
            found[position] = _parts(call, dtypes, order.take_ahead(call.group_of(rank)))
    return found


def _parts(call: collective_call.Call, dtypes: Sequence[torch.dtype], ahead: Sequence[int]) -> Parts:
    """A call by the dtypes of its values: the places of each, and what is done with them."""
    by_dtype = collective_call.by_dtype(dtypes)
    return [(places, _bindings.Collective(**call.attributes([] if i else ahead))) for i, places in enumerate(by_dtype)]


def _compute(inputs: list[torch.Tensor], text: str) -> list[torch.Tensor]:
    connection = session.connection()
    assert connection is not None
    connection.check()
    call, rank = collective_call.parse(text), connection.rank_info.rank
    group = call.group_of(rank)
    if len(group) > 1:
        connection.group(group)
    number = sequence.numbered(sequence.described(call, inputs), f"run at {_bindings.user_frame()}")
    results = [torch.empty(call.shape_of_result(x.shape, rank), dtype=x.dtype) for x in inputs]

    def run() -> None:
        for places, part in _parts(call, [x.dtype for x in inputs], [number]):
            part.run([inputs[i].contiguous() for i in places], [results[i] for i in places])

    try:
        interruptible.call(run, str(call))
    except Exception as error:
        reason = failures.explained(error)
        if reason is None:
            raise
        raise JobError(reason) from None
    except BaseException:  # the thread that is in it must not be waited for
        connection.break_off(f"[job] rank {rank} was interrupted in {sequence.meaning(number)[0]}")
        raise
    return [*results, torch.zeros((), dtype=torch.uint8)]
