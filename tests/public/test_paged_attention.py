"""Attention over pages and grouped products against Python loops, and their ``torch.ops.xla`` operators."""

from __future__ import annotations

import pytest
import torch

from torch_xla.experimental import custom_kernel

PAGE, DIM, HEADS, KV_HEADS = 4, 8, 4, 2


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float | None = None) -> torch.Tensor:
    """One query `[heads, dim]` to keys `[key heads, keys, dim]`."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = (k @ q[:, :, None])[..., 0]
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    return (scores.softmax(-1)[:, None] @ v)[:, 0]


def pages_of(pages: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([pages[:, i] for i in row.tolist()], 1)[:, :length]


@pytest.mark.parametrize("cap", [None, 2.0])
def test_one_token_and_several_tokens_per_sequence(cap: float | None) -> None:
    k, v = torch.randn(2, KV_HEADS, 6, PAGE, DIM)
    lengths, rows = torch.tensor([3, 8]), torch.tensor([[4, 1], [0, 5]])
    q = torch.randn(2, 3, HEADS, DIM)
    counts = torch.tensor([2, 3])
    on_xla = [x.to("xla") for x in (k, v, lengths, rows)]
    last = torch.ops.xla.paged_attention(q[:, 0].to("xla"), *on_xla, 1, attn_logits_soft_cap=cap)
    several = torch.ops.xla.multi_queries_paged_attention(
        q.to("xla"), *on_xla, counts.to("xla"), 1, 1, False, attn_logits_soft_cap=cap
    )
    for s in range(2):
        length = int(lengths[s])
        keys, values = pages_of(k, rows[s], length), pages_of(v, rows[s], length)
        torch.testing.assert_close(last[s].cpu(), attention(q[s, 0], keys, values, cap))
        for t in range(int(counts[s])):
            seen = length - int(counts[s]) + t + 1
            torch.testing.assert_close(several[s, t].cpu(), attention(q[s, t], keys[:, :seen], values[:, :seen], cap))


@pytest.mark.parametrize("window", [None, 3])
def test_sequences_in_one_tensor(window: int | None) -> None:
    pages = torch.randn(6, PAGE, 2 * KV_HEADS, DIM)
    lengths, rows = torch.tensor([5, 7, 0]), torch.tensor([[2, 0], [1, 4], [0, 0]])
    starts = torch.tensor([0, 2, 6, 6])
    q = torch.randn(8, HEADS, DIM)  # two tokens belong to none
    moved = [x.to("xla") for x in (q, pages, lengths, rows, starts, torch.tensor([2]))]
    result = torch.ops.xla.ragged_paged_attention(*moved, sm_scale=0.5, sliding_window=window, k_scale=2.0).cpu()
    k, v = (pages[:, :, i::2].permute(2, 0, 1, 3) for i in (0, 1))
    for s in range(2):
        begin, end = int(starts[s]), int(starts[s + 1])
        for t in range(begin, end):
            seen = int(lengths[s]) - (end - 1 - t)
            first = 0 if window is None else max(0, seen - window)
            keys, values = (pages_of(x, rows[s], seen)[:, first:] for x in (k, v))
            torch.testing.assert_close(result[t], attention(q[t] * 0.5, keys * 2, values))
    assert not result[6:].any()


def test_products_of_groups_have_gradients() -> None:
    lhs, rhs, sizes = torch.randn(7, 3), torch.randn(3, 3, 5), torch.tensor([2, 0, 4])
    x, w = lhs.to("xla").requires_grad_(), rhs.mT.to("xla").requires_grad_()
    result = torch.ops.xla.gmm(x, w, sizes.to("xla"), transpose_rhs=True)
    expected = torch.cat([lhs[:2] @ rhs[0], lhs[2:6] @ rhs[2], torch.zeros(1, 5)])
    torch.testing.assert_close(result.detach().cpu(), expected)
    result.sum().backward()
    assert w.grad is not None and w.grad[0].any() and not w.grad[1].any()
    with pytest.raises(ValueError, match=r"\[gmm\] got a group_offset"):
        custom_kernel.gmm(lhs, rhs, sizes, group_offset=sizes)


def test_flash_attention_is_an_operator() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, DIM).to("xla")
    expected = custom_kernel.flash_attention(q, k, v, True)
    torch.testing.assert_close(torch.ops.xla.flash_attention(q, k, v, True).cpu(), expected.cpu())
    with pytest.raises(ValueError, match="expected a multiple of the heads of keys"):
        custom_kernel.paged_attention(
            torch.ones(1, 3, 8), torch.ones(2, 1, 4, 8), torch.ones(2, 1, 4, 8), torch.ones(1), torch.zeros(1, 1).long()
        )
