"""The verifier names what is wrong with a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import cut

import torch_xla  # noqa: F401
from torch_xla._core.graph.graph import Edge, Graph
from torch_xla._core.graph.verify import GraphError, verify


@pytest.fixture
def graph() -> Graph:
    x = torch.arange(6, device="xla")
    return cut((x + x * 2).sum())


def test_a_cut_graph_is_sound(graph: Graph) -> None:
    verify(graph)


@pytest.mark.parametrize(
    ("edge", "says"),
    [
        (Edge(leaf=False, slot=2, result=0), "does not come before it"),
        (Edge(leaf=True, slot=3, result=0), "reads leaf 3 of 0"),
    ],
)
def test_an_input_that_does_not_exist_or_comes_later(graph: Graph, edge: Edge, says: str) -> None:
    first = replace(graph.nodes[1], inputs=(edge,))
    with pytest.raises(GraphError, match=says):
        verify(replace(graph, nodes=(graph.nodes[0], first, *graph.nodes[2:])))


def test_a_missing_argument(graph: Graph) -> None:
    last = replace(graph.nodes[-1], args=graph.nodes[-1].args[:-1])
    with pytest.raises(GraphError, match="arguments, its schema"):
        verify(replace(graph, nodes=(*graph.nodes[:-1], last)))


def test_an_output_listed_twice(graph: Graph) -> None:
    with pytest.raises(GraphError, match="listed twice"):
        verify(replace(graph, outputs=graph.outputs * 2))
