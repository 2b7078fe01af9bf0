"""Reads and writes at positions that are data."""

from __future__ import annotations

import torch
from harness import values

A = torch.ops.aten
X = torch.randn(4, 5, 6)
V = torch.randn(7)
N = torch.arange(20).reshape(4, 5)
ROW = torch.tensor([0, -1, 2])
COLUMN = torch.tensor([[1], [3]])
MASK = torch.tensor([True, False, True, False])
GRID = torch.rand(4, 5) > 0.5
WHERE = torch.tensor([[0, 1, 2, 0], [3, 2, 0, 1]])

test_values = values(
    [
        (A.index.Tensor, X, [ROW]),
        (A.index.Tensor, X, [None, ROW]),
        (A.index.Tensor, X, [ROW, None, ROW]),
        (A.index.Tensor, X, [ROW, COLUMN]),
        (A.index.Tensor, X, [None, ROW, COLUMN]),
        (A.index.Tensor, X, [torch.tensor(2)]),
        (A.index.Tensor, N, [ROW.int()]),
        (A.index.Tensor, X, [torch.empty(0, dtype=torch.int64)]),
        (A._unsafe_index.Tensor, X, [None, None, ROW]),
        (A.index_select.default, X, -1, ROW.abs()),
        (A.index_select.default, N, 0, torch.tensor(1)),
        (A.index_select.default, torch.tensor(3.0), 0, torch.tensor([0])),
        (A.gather.default, N, 0, torch.tensor([[0, 3, 1, 0, 2]])),
        (A.gather.default, N, -1, torch.tensor([[4, 0], [1, 1]])),
        (A.gather.default, torch.tensor(5.0), 0, torch.tensor([0, 0])),
        (A.gather.default, V, 0, torch.empty(0, dtype=torch.int64)),
        (A.take.default, N, torch.tensor([[0, 19], [-1, 7]])),
        (A.put.default, N, torch.tensor([0, 19]), torch.tensor([100, 200])),
        (A.put.default, MASK, torch.tensor([1, 1]), torch.tensor([False, True]), True),
        (A._unsafe_masked_index.default, X, MASK[:, None, None], [torch.tensor([[0], [9], [2], [-9]]), ROW], 2.5),
        (
            A._unsafe_masked_index_put_accumulate.default,
            *(
                N,
                torch.tensor([[True], [False], [True]]),
                [torch.tensor([3, 99, 3])],
                torch.ones(3, 5, dtype=torch.int64),
            ),
        ),
        (A.put.default, N, torch.tensor([0, 0, 3]), torch.tensor([100, 200, 1]), True),
        (A.index_put.default, X, [ROW], torch.ones(3, 5, 6)),
        (A.index_put.default, X, [ROW], torch.tensor(2.0)),
        (A.index_put.default, X, [None, ROW], torch.ones(4, 3, 6), True),
        (A.index_put.default, V, [torch.tensor([1, 1, 2])], torch.ones(3), True),
        (A.index_put.default, N, [ROW, ROW], torch.tensor([7, 8, 9])),
        (A.index_put.default, X, [MASK], torch.tensor(2.0)),
        (A.index_put.default, X, [MASK], torch.ones(1), True),
        (A.index_put.default, X, [MASK], torch.ones(2, 5, 6)),
        (A.index_put.default, X, [MASK], torch.randn(2, 1, 6), True),
        (A.index_put.default, X, [MASK], torch.ones(5, 6)),
        (A.index_put.default, X, [GRID], torch.randn(int(GRID.sum()), 6)),
        (A.index_put.default, N, [GRID], torch.arange(int(GRID.sum()))),
        (A.index_put.default, X, [None, torch.tensor([True, False, True, True, False])], torch.randn(4, 3, 6)),
        (A.index_put.default, MASK, [torch.tensor([1, 1])], torch.tensor([True, False]), True),
        (A._index_put_impl.default, V, [ROW], torch.zeros(3)),
        (A._unsafe_index_put.default, V, [ROW], torch.zeros(3), True),
        (A.scatter.src, N, 0, WHERE, torch.arange(100, 108).reshape(2, 4)),
        (A.scatter.src, X[0], 1, torch.tensor([[1], [0], [5], [2], [3]]), torch.randn(5, 3)),
        (A.scatter.value, N, 1, WHERE, 7),
        (A.scatter.value, X[0], -1, torch.tensor([[1, 2], [0, 3], [5, 0], [2, 1], [3, 4]]), 2.5),
        (A.scatter.value, torch.tensor(1.0), 0, torch.tensor(0), 2.5),
        (A.scatter.value, GRID, 0, torch.tensor([[0, 1, 2, 3, 0]]), True),
        (A.scatter.value, V, 0, torch.empty(0, dtype=torch.int64), 1.0),
        (A.scatter.reduce, N, 0, WHERE, torch.arange(8).reshape(2, 4), {"reduce": "add"}),
        (A.scatter.reduce, N, 0, WHERE, torch.arange(8).reshape(2, 4), {"reduce": "multiply"}),
        (A.scatter.value_reduce, N, 0, WHERE, 3, {"reduce": "multiply"}),
        (A.scatter_add.default, torch.zeros(4, 5), 0, torch.zeros(6, 5, dtype=torch.int64), torch.randn(6, 5)),
        (A.scatter_add.default, torch.zeros(3, 5), 1, torch.tensor([[1], [1], [4]]), torch.randn(3, 1)),
        (A.scatter_add.default, torch.zeros(5), 0, torch.tensor([1, 1, 4]), torch.randn(3)),
        (A.index_add.default, X, 1, ROW.abs(), torch.randn(4, 3, 6), {"alpha": 0.5}),
        (A.index_add.default, N, 0, torch.tensor([1, 1]), torch.ones(2, 5, dtype=torch.int64)),
        (A.index_add.default, torch.tensor(1.0), 0, torch.tensor([0]), torch.tensor(2.0)),
        (A.index_copy.default, X, -1, torch.tensor([3, 0]), torch.randn(4, 5, 2)),
        (A.index_fill.int_Scalar, X, 1, torch.tensor([3, 0]), 2.5),
        (A.index_fill.int_Tensor, N, 0, torch.tensor([3, -4]), torch.tensor(9)),
        (A.masked_scatter.default, X[0], GRID.new_ones(5, 1), torch.randn(30)),
        (A.masked_scatter.default, N, GRID, torch.arange(100, 120)),
        (A.masked_scatter_backward.default, torch.randn(4, 5), GRID, [4, 5]),
        (A.nonzero_static.default, GRID, {"size": 12}),
        (A.nonzero_static.default, N, {"size": 25, "fill_value": 3}),
        (A.embedding.default, torch.randn(6, 3), WHERE),
        (A.embedding.default, torch.randn(6, 3, dtype=torch.bfloat16), torch.tensor(1)),
        (A.embedding_dense_backward.default, torch.randn(2, 4, 3), WHERE, 6, -1, False),
        (A.embedding_dense_backward.default, torch.randn(2, 4, 3), WHERE, 6, 2, True),
        (A.embedding_dense_backward.default, torch.randn(2, 4, 3, dtype=torch.bfloat16), WHERE.int(), 6, 0, False),
    ]
)


@values
def test_reductions():
    for include_self in (True, False):
        for reduce in ("sum", "prod", "mean", "amax", "amin"):
            dtype = torch.int64 if reduce == "mean" else torch.float32
            x, src = (torch.randn(rows, 5).mul(9).to(dtype) for rows in (4, 6))
            yield A.scatter_reduce.two, x, 0, torch.randint(0, 4, (6, 5)), src, reduce, {"include_self": include_self}
            if reduce != "sum":
                x, src, index = torch.randn(4, 5), torch.randn(4, 3), torch.tensor([1, 1, 4])
                yield A.index_reduce.default, x, 1, index, src, reduce, {"include_self": include_self}
