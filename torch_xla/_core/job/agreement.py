"""Agreement: processes run the same collectives, or learn which is the first that is not.

The processes of a group tell each other a number for each collective that they are about to run.
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
    """Makes the groups of a program that is about to be used for the first time.

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
    """Compares what XLA's own collectives are about to do, which do not look: once per program.

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
