"""Views, their copies, joins, splits and writes into views."""

from __future__ import annotations

import torch
from harness import lower, values

A = torch.ops.aten
X = torch.randn(3, 4, 5)
M = torch.randn(4, 6)
N = torch.arange(24).reshape(2, 3, 4)
B = torch.tensor([[True, False, True], [False, False, True]])
H = torch.randn(2, 3, dtype=torch.bfloat16)
S = torch.tensor(2.5)
Z = torch.zeros(0, 3)
C = torch.randn(2, 3, dtype=torch.complex64)
LAST = 2**63 - 1

# Sizes, strides and offsets of what is read from a storage, and of what is written to one.
READ = [
    *(((3, 8), (8, 1), 0), ((8, 3), (1, 8), 0), ((2, 3), (8, 2), 1), ((3,), (8,), 4), ((2, 3, 4), (0, 8, 2), 0)),
    *(((4, 4), (1, 1), 2), ((3, 4), (5, 1), 3), ((5,), (0,), 7), ((), (), 23), ((0, 3), (1, 1), 0)),
    *(((1, 4), (100, 6), 3), ((3, 1, 4), (8, 1, 2), None)),
]
WRITTEN = [((2, 8), (8, 1), 4), ((3, 2), (8, 2), 1), ((8, 3), (1, 8), 0), ((), (), 3)]

test_values = values(
    [
        (A.view.default, X, [12, 5]),
        (A.view.default, X, [-1]),
        (A.view.default, S, [1, 1]),
        (A.view.default, Z, [3, 0]),
        (A._unsafe_view.default, X, [3, 20]),
        (A.view_copy.default, B, [6]),
        (A._reshape_copy.default, X, [60]),
        (A.expand.default, torch.randn(3, 1), [2, 3, 4]),
        (A.expand.default, torch.randn(3, 1), [-1, 4]),
        (A.expand_copy.default, S, [2]),
        (A.permute.default, X, [2, -3, 1]),
        (A.permute_copy.default, H, [1, 0]),
        (A.permute.default, S, []),
        (A.transpose.int, X, -1, 0),
        (A.transpose.int, S, 0, -1),
        (A.transpose_copy.int, N, 1, 2),
        (A.t.default, M),
        (A.t.default, torch.ones(3)),
        (A.t_copy.default, M),
        (A.unsqueeze.default, X, -1),
        (A.unsqueeze.default, S, 0),
        (A.squeeze.default, torch.ones(1, 3, 1)),
        (A.squeeze.dim, torch.ones(1, 3, 1), -1),
        (A.squeeze.dim, torch.ones(1, 3, 1), 1),
        (A.squeeze.dim, S, 0),
        (A.squeeze.dims, torch.ones(1, 3, 1), [0, 1]),
        (A.squeeze_copy.dims, torch.ones(1, 3, 1), [0, -1]),
        (A.select.int, X, 1, -1),
        (A.select.int, B, -1, 2),
        (A.select_copy.int, N, 0, 1),
        (A.slice.Tensor, X, 1, 1, LAST),
        (A.slice.Tensor, X, -1, None, -2, 2),
        (A.slice.Tensor, X, 0, 5, 2),
        (A.slice.Tensor, X, 2, -100, 100, 3),
        (A.slice.Tensor, Z, 0),
        (A.slice_copy.Tensor, N, 2, 1, 4, 2),
        (A.narrow_copy.default, X, 1, 1, 2),
        (A.narrow_copy.default, X, -1, -3, 2),
        (A.split.Tensor, X, 2, 1),
        (A.split.Tensor, X, 3, -1),
        (A.split_copy.Tensor, Z, 1),
        (A.unsafe_split.Tensor, N, 1),
        (A.chunk.default, X, 3, 2),
        (A.split_with_sizes.default, X, [1, 0, 4], 2),
        (A.split_with_sizes_copy.default, X, [1, 3], 1),
        (A.unsafe_split_with_sizes.default, X, [1, 3], -2),
        (A.unbind.int, X, -2),
        (A.unbind_copy.int, B),
        (A.diagonal.default, X, 1, 0, -1),
        (A.diagonal.default, M, -2),
        (A.diagonal.default, M, 9),
        (A.diagonal_copy.default, M, 2),
        (A.unfold.default, X, 1, 2, 1),
        (A.unfold.default, X, -1, 2, 2),
        (A.unfold_copy.default, X, 2, 3, 2),
        (A.unfold.default, S, 0, 1, 1),
        (A.unfold_backward.default, torch.randn(3, 3, 5, 2), [3, 4, 5], 1, 2, 1),
        (A.slice_scatter.default, X, torch.ones(3, 2, 5), 1, 1, 4, 2),
        (A.slice_scatter.default, X, torch.ones(3, 2, 5), 1, 2, LAST),
        (A.slice_scatter.default, X, torch.ones(3, 4, 5)),
        (A.slice_scatter.default, X, torch.ones(0, 4, 5), 0, 2, 2),
        (A.slice_scatter.default, B, torch.ones(2, 1, dtype=torch.bool), 1, 0, 1),
        (A.slice_scatter.default, N, torch.zeros(2, 2, 4, dtype=torch.int64), 1, -3, None, 2),
        (A.select_scatter.default, X, torch.ones(3, 5), 1, -1),
        (A.diagonal_scatter.default, M, torch.ones(4), 1),
        (A.diagonal_scatter.default, X, torch.ones(4, 2), -1, 0, 2),
        (A.slice_backward.default, torch.randn(3, 2, 5), [3, 4, 5], 1, 0, LAST, 2),
        (A.slice_backward.default, torch.randn(3, 0, 5), [3, 4, 5], 1, 4, LAST, 1),
        (A.select_backward.default, torch.randn(3, 5), [3, 4, 5], 1, -2),
        (A.diagonal_backward.default, torch.randn(3), [4, 3], 0, 0, 1),
        (A.diag_embed.default, torch.randn(2, 3), 1),
        (A.diag_embed.default, torch.randn(2, 3), -1, 0, 2),
        (A.view.dtype, X, torch.int32),
        (A.view.dtype, M, torch.float64),
        (A.view.dtype, N, torch.int16),
        (A.view.dtype, H, torch.int16),
        (A.view.dtype, B, torch.uint8),
        (A.view.dtype, torch.tensor([0, 1], dtype=torch.uint8), torch.bool),
        (A.view.dtype, C, torch.float32),
        (A.view.dtype, M, torch.complex64),
        (A.view_as_real.default, C),
        (A.view_as_complex_copy.default, torch.randn(3, 2)),
        (A._conj_physical.default, C),
        (A._neg_view_copy.default, C),
        (A.detach_copy.default, X),
        (A.alias.default, B),
        (A.real.default, C),
        (A.imag.default, C),
        (A.cat.default, [X, X[:, :2]], 1),
        (A.cat.default, [torch.zeros(0), M, M], -1),
        (A.cat.default, [H, M[:, :3]]),
        (A.cat.default, [torch.zeros(0), torch.zeros(0)]),
        (A.cat.default, [N, B[:, :, None].expand(2, 3, 4)], 2),
        (A.stack.default, [X, X], -1),
        (A.stack.default, [S, S]),
        (A.repeat.default, M, [2, 1, 3]),
        (A.repeat.default, S, [3]),
        (A.repeat.default, M, [0, 2]),
        (A.flip.default, X, [0, -1]),
        (A.flip.default, B, [1]),
        (A.roll.default, X, [1, -2], [0, 2]),
        (A.roll.default, X, [7]),
        (A.roll.default, Z, [1], [0]),
        (A.rot90.default, M),
        (A.rot90.default, M, -1, [1, 0]),
        (A.tril.default, X),
        (A.tril.default, M, -1),
        (A.triu.default, N, 1),
        (A.triu.default, B),
        (A.tril.default, Z),
        (A.triu.default, M, -(2**40)),
        (A.pixel_shuffle.default, torch.randn(2, 8, 3, 3), 2),
        (A.pixel_unshuffle.default, torch.randn(2, 4, 6), 2),
        (A.channel_shuffle.default, torch.randn(2, 6, 3, 3), 3),
        (A.repeat_interleave.self_int, X, 2, 1),
        (A.repeat_interleave.self_int, X, 2),
        (A.repeat_interleave.Tensor, torch.tensor([2, 0, 3]), {"output_size": 5}),
        *((A.as_strided.default, torch.arange(24), list(n), list(by), start) for n, by, start in READ),
        *(
            (A.as_strided_scatter.default, torch.arange(24.0), torch.full(n, -1.0), list(n), list(by), start)
            for n, by, start in WRITTEN
        ),
    ]
)


def test_split_of_an_empty_dimension_gives_one_piece():
    (piece,) = lower(A.split.Tensor, torch.zeros(0, 2), 3)
    assert piece is not None and piece.shape == (0, 2)
