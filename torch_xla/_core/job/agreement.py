"""Agreement: the processes of a group run the same collectives in the same order, or learn which one differs first.

Where programs span the devices of a job, XLA does not compare their collectives, so they are compared here before a
program's first run. Elsewhere `csrc/run/collective_kernel.cpp` does it as each collective starts, by hashes of their
descriptions (`graph/sequence.py`).
"""

from __future__ import annotations

from torch_xla._core.device import client
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Graph
from torch_xla._core.job import session
from torch_xla._errors import GraphFailure, JobError
from torch_xla.ops import collective


def prepare(graph: Graph) -> None:
    """Before a program's first use: compares its collectives, where it spans the job, or else makes their groups.

    GraphFailure where somebody cannot come.
    """
    connection = session.connection() if any(map(sequence.is_collective, graph.nodes)) else None
    if connection is None:
        return
    collective.register()  # the program may come from another process
    try:
        connection.check()
        for group, entries in sequence.collectives(graph, connection.rank_info.rank).items():
            if client.spans_job():
                connection.compare(group, entries, "the first start of a program with collectives")
            elif len(group) > 1:
                connection.group(group)
    except JobError as error:
        collectives = tuple(i for i, node in enumerate(graph.nodes) if sequence.is_collective(node))
        raise GraphFailure(error, collectives) from None
