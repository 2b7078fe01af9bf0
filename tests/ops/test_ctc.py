"""The loss of unaligned label sequences."""

from __future__ import annotations

import pytest
import torch
from harness import lower, values

A = torch.ops.aten
LOG_PROBS = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
INPUTS, LENGTHS = [8, 6, 7], [3, 1, 2]
PADDED = torch.tensor([[1, 1, 2], [4, 0, 0], [3, 2, 0]])
# Targets, lengths of inputs and of targets, blank, whether infinite losses are zeros.
CASES = {
    "padded and possible": (PADDED, INPUTS, LENGTHS, 0, True),
    "flat, one impossible": (torch.tensor([1, 1, 2, 4, 3, 2]), [2, 6, 7], LENGTHS, 0, True),
    "no input": (PADDED, [0, 0, 7], [0, 1, 2], 0, False),
    "empty targets": (torch.zeros(3, 0, dtype=torch.long), INPUTS, [0, 0, 0], 0, False),
    "another blank": (torch.tensor([[0, 1, 0], [2, 0, 0], [3, 3, 0]]), INPUTS, LENGTHS, 4, False),
}


@pytest.mark.parametrize("name", CASES)
def test_losses(name):
    ours, _ = lower(A._ctc_loss.default, LOG_PROBS, *CASES[name])
    torch.testing.assert_close(ours, A._ctc_loss(LOG_PROBS, *CASES[name])[0])


@values
def test_gradients():
    for name in list(CASES)[:3]:
        targets, inputs, lengths, blank, _ = CASES[name]
        loss, alpha = A._ctc_loss(LOG_PROBS, *CASES[name])
        yield A._ctc_loss_backward.default, torch.rand(3), LOG_PROBS, targets, inputs, lengths, loss, alpha, blank, True
