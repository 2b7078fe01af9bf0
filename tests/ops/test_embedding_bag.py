"""Sums, means and maxima over ragged groups of embedding rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import check, lower

A = torch.ops.aten
INDICES = torch.tensor([0, 4, 2, 3, 3, 4])


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("sum", {}),
        ("sum", {"weighted": True, "padding_idx": 3}),
        ("mean", {"padding_idx": 3}),
        ("mean", {"scale_grad_by_freq": True}),
        ("max", {}),
        ("max", {"padding_idx": 4}),
    ],
    ids=str,
)
def test_forward_and_gradients(mode, options):
    offsets, options = [0, 2, 2, 5], dict(options)
    weighted = options.pop("weighted", False)
    code = ["sum", "mean", "max"].index(mode)
    weight = torch.randn(6, 3, requires_grad=True)
    scales = torch.randn(6, requires_grad=True) if weighted else None
    expected = F.embedding_bag(INDICES, weight, torch.tensor(offsets), mode=mode, per_sample_weights=scales, **options)
    scale_by, padding = options.get("scale_grad_by_freq", False), options.get("padding_idx", -1)
    plain, plain_scales = weight.detach(), scales.detach() if weighted else None
    out, bag, sizes, winners = lower(
        A._embedding_bag.default,
        *(plain, INDICES, torch.tensor(offsets), scale_by, code, False, plain_scales, False, padding),
    )
    torch.testing.assert_close(out, expected.detach())
    grad = torch.randn_like(out)
    reference = torch.autograd.grad(expected, (weight, *([scales] if weighted else [])), grad)
    if winners.shape != out.shape:
        winners = torch.zeros(4, dtype=torch.int64)
    (ours,) = lower(
        A._embedding_bag_backward.default,
        *(grad, INDICES, torch.tensor(offsets), bag, sizes, winners, 6, scale_by, code, False, plain_scales, padding),
    )
    torch.testing.assert_close(ours, reference[0])
    if weighted:
        (ours,) = lower(
            A._embedding_bag_per_sample_weights_backward.default,
            *(grad, plain, INDICES, torch.tensor(offsets), bag, code, padding),
        )
        torch.testing.assert_close(ours, reference[1])


def test_last_offset_may_be_included():
    out, *_ = lower(
        A._embedding_bag_forward_only.default,
        *(torch.ones(6, 3), INDICES, torch.tensor([0, 2, 6]), False, 0, False, None, True),
    )
    torch.testing.assert_close(out, torch.tensor([[2.0], [4.0]]).expand(2, 3))


def test_dense_backward():
    bag, sizes = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 3, 1])
    winners = torch.zeros(3, dtype=torch.int64)
    check(
        A._embedding_bag_dense_backward.default,
        *(torch.randn(3, 4), INDICES, bag, sizes, winners, 6, False, 1, None),
    )
