"""The loss of unaligned label sequences."""

from __future__ import annotations

import pytest
import torch
from harness import lower

A = torch.ops.aten
LOG_PROBS = torch.randn(8, 3, 5).log_softmax(-1)
INPUTS, LENGTHS = [8, 6, 7], [3, 1, 2]
PADDED = torch.tensor([[1, 1, 2], [4, 0, 0], [3, 2, 0]])
FLAT = torch.tensor([1, 1, 2, 4, 3, 2])


@pytest.mark.parametrize(
    "targets, inputs, lengths",
    [(PADDED, INPUTS, LENGTHS), (FLAT, [2, 6, 7], LENGTHS)],
    ids=["padded and possible", "flat, one impossible"],
)
def test_ctc(targets, inputs, lengths):
    loss, alpha = A._ctc_loss(LOG_PROBS, targets, inputs, lengths, 0, True)
    ours, _ = lower(A._ctc_loss.default, LOG_PROBS, targets, inputs, lengths, 0, True)
    torch.testing.assert_close(ours, loss)
    args = (torch.rand(3), LOG_PROBS, targets, inputs, lengths, loss, alpha, 0, True)
    (slope,) = lower(A._ctc_loss_backward.default, *args)
    torch.testing.assert_close(slope, A._ctc_loss_backward(*args), rtol=1e-4, atol=1e-5)


def test_empty_targets():
    targets = torch.zeros(3, 0, dtype=torch.long)
    loss, _ = A._ctc_loss(LOG_PROBS, targets, INPUTS, [0, 0, 0], 0, False)
    torch.testing.assert_close(lower(A._ctc_loss.default, LOG_PROBS, targets, INPUTS, [0, 0, 0], 0, False)[0], loss)


def test_no_input():
    args = (LOG_PROBS, PADDED, [0, 0, 7], [0, 1, 2], 0, False)
    loss, alpha = A._ctc_loss(*args)
    torch.testing.assert_close(lower(A._ctc_loss.default, *args)[0], loss)
    args = (torch.ones(3), LOG_PROBS, PADDED, [0, 0, 7], [0, 1, 2], loss, alpha, 0, True)
    (slope,) = lower(A._ctc_loss_backward.default, *args)
    torch.testing.assert_close(slope, A._ctc_loss_backward(*args), rtol=1e-4, atol=1e-5)


def test_another_blank():
    targets = torch.tensor([[0, 1, 0], [2, 0, 0], [3, 3, 0]])
    loss, _ = A._ctc_loss(LOG_PROBS, targets, INPUTS, LENGTHS, 4, False)
    torch.testing.assert_close(lower(A._ctc_loss.default, LOG_PROBS, targets, INPUTS, LENGTHS, 4, False)[0], loss)
