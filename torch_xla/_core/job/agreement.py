"""Agreement: the processes of a group run the same collectives in the same order, or learn which one differs first.

A collective's number is a hash of its description (`graph/sequence.py`). Where programs span the devices of a job, the
numbers of a program are compared here, before its first run. Elsewhere `csrc/run/collective_kernel.cpp` compares them
as each collective starts.
"""

from __future__ import annotations

import json

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Graph
from torch_xla._core.job import program_starts
from torch_xla._core.job.connection import Session
from torch_xla._core.job.session import session
from torch_xla._errors import JobError
from torch_xla.ops import collective, collective_call


def prepare(graph: Graph) -> None:
    """Before a program's first use: compares its collectives, where it spans the job, or else makes their groups.

    JobError where somebody cannot come.
    """
    calls = [collective_call.parse(node.args[1]) for node in graph.nodes if sequence.is_collective(node)]
    if not calls:
        return
    connection = session()
    if connection is None:
        return
    collective.register()  # the program may come from another process
    try:
        connection.check()
        numbers = sequence.numbers(graph, connection.rank_info.rank)
        if client.spans_job():
            for group, group_numbers in numbers.items():
                _compare(connection, group, group_numbers)
            return
        for call in calls:
            group = call.group_of(connection.rank_info.rank)
            if len(group) > 1:
                connection.group(group)
    except JobError as error:
        error.nodes = tuple(i for i, node in enumerate(graph.nodes) if sequence.is_collective(node))
        raise


def _compare(connection: Session, group: tuple[int, ...], own: list[int]) -> None:
    """Compares a program's collectives with those of the group's other processes, once: XLA's own do not compare.

    Raises JobError where processes of a group differ.
    """
    meanings = [sequence.meaning(number) for number in own]
    replies = [json.loads(text) for text in connection.meet("program", group, json.dumps([own, meanings]).encode())]
    first, said = replies[0]
    for rank, (other, reported) in zip(group[1:], replies[1:], strict=True):
        if other == first:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other))
        )
        texts = [
            f"rank {who} runs " + (sequence.said(operations[place]) if place < len(operations) else "no more")
            for who, operations in ((group[0], said), (rank, reported))
        ]
        connection.fail(f"[job] the processes differ in what they do together: {texts[0]}, {texts[1]}")


def announce(program: _bindings.Program, graph: Graph) -> None:
    """Has the starts of a program counted that processes run together without meeting each other."""
    connection = session()
    if connection is not None:
        program_starts.announce(program, graph, connection.rank_info.rank)


def part_of(graph: Graph) -> str:
    """What this process does in the collectives of a graph; the programs of those that do the same are the same."""
    connection = session()
    if connection is None:
        return ""
    numbers = sequence.numbers(graph, connection.rank_info.rank)
    return str([(len(group), group_numbers) for group, group_numbers in numbers.items()])
