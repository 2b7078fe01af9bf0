"""Attention over keys and values that are kept in pages, for servers of language models.

These are plain programs, right on every device; a token's keys are gathered before they are used, so that memory grows
with tokens times the longest sequence.
"""

from __future__ import annotations

import torch

from torch_xla._errors import message


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    pages_per_compute_block: int = 1,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence.

    Args:
        q: Queries, ``[sequences, heads, dim]``, scaled already.
        k_pages: Keys, ``[key heads, pages, page size, dim]``; `heads` is a multiple of `key heads`.
        v_pages: Values, likewise.
        lengths: How many keys each sequence has.
        page_indices: Pages of each sequence, ``[sequences, pages per sequence]``.
        pages_per_compute_block: Not used: a matter of speed on TPUs.
        megacore_mode: Not used, likewise.
        attn_logits_soft_cap: Bounds the scores softly by this number.

    Returns:
        ``[sequences, heads, dim]``.
    """
    k, v = (_gathered(pages, page_indices) for pages in (k_pages, v_pages))
    return _attend(q, k, v, lengths - 1, soft_cap=attn_logits_soft_cap)


def multi_queries_paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    effective_q_lens: torch.Tensor,
    num_kv_pages_per_compute_block: int = 1,
    num_queries_per_compute_block: int = 1,
    use_kernel: bool = True,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of each sequence, each to the keys up to its own.

    Args:
        q: Queries, ``[sequences, tokens, heads, dim]``, scaled already.
        k_pages: As for `paged_attention`.
        v_pages: As for `paged_attention`.
        lengths: How many keys each sequence has, those of the queries included.
        page_indices: As for `paged_attention`.
        effective_q_lens: How many of its tokens count, per sequence; what the others give is of no meaning.
        num_kv_pages_per_compute_block: Not used.
        num_queries_per_compute_block: Not used.
        use_kernel: Not used.
        attn_logits_soft_cap: Bounds the scores softly by this number.

    Returns:
        ``[sequences, tokens, heads, dim]``.
    """
    sequences, tokens = q.shape[:2]
    k, v = (_gathered(pages, page_indices).repeat_interleave(tokens, 0) for pages in (k_pages, v_pages))
    positions = (lengths - effective_q_lens)[:, None] + torch.arange(tokens, device=q.device)
    positions = torch.minimum(positions, lengths[:, None] - 1)
    return _attend(q.flatten(0, 1), k, v, positions.flatten(), soft_cap=attn_logits_soft_cap).view(q.shape)


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """Attention of the tokens of several sequences that follow one another in one tensor.

    Args:
        q: Queries, ``[tokens, heads, dim]``.
        kv_pages: Keys and values in turn, ``[pages, page size, 2 * key heads, dim]``.
        kv_lens: How many keys each sequence has, those of its queries included.
        page_indices: Pages of each sequence, ``[sequences, pages per sequence]``.
        cu_q_lens: Where each sequence's queries start; the next entry is where they end.
        num_seqs: How many sequences there are, one integer.
        sm_scale: Factor of the scores.
        sliding_window: How many keys, its own included, a query sees at most.
        soft_cap: Bounds the scores softly by this number.
        mask_value: Not used: what is not seen has no weight.
        k_scale: Factor of the keys.
        v_scale: Factor of the values.
        use_kernel: Not used.
        num_kv_pages_per_block: Not used.
        num_queries_per_block: Not used.
        vmem_limit_bytes: Not used.

    Returns:
        ``[tokens, heads, dim]``; zeros for tokens of no sequence.
    """
    tokens = torch.arange(q.shape[0], device=q.device)
    ends = torch.where(torch.arange(len(kv_lens), device=q.device) < num_seqs, cu_q_lens[1:], cu_q_lens.max())
    count = cu_q_lens.gather(0, num_seqs.reshape(1).long())
    sequence = torch.searchsorted(ends.to(tokens.dtype), tokens, right=True).clamp(max=len(kv_lens) - 1)
    # A sequence's last token sees its last key.
    positions = kv_lens[sequence] - cu_q_lens[1:][sequence] + tokens
    pages = page_indices[sequence]
    k, v = (_gathered(half.permute(2, 0, 1, 3), pages) for half in (kv_pages[:, :, 0::2], kv_pages[:, :, 1::2]))
    k = k if k_scale is None else k.float() * k_scale
    v = v if v_scale is None else v.float() * v_scale
    output = _attend(q, k, v, positions, sm_scale, soft_cap, sliding_window)
    return torch.where((tokens < count)[:, None, None], output, torch.zeros_like(output))


def _gathered(pages: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The keys of each row of page numbers, ``[rows, key heads, keys, dim]``."""
    return pages[:, indices].movedim(0, 1).flatten(2, 3)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float = 1.0,
    soft_cap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of single queries ``[rows, heads, dim]``, each to its own keys up to a position."""
    rows, heads, dim = q.shape
    if heads % k.shape[1] != 0:
        got = f"got {heads} heads of queries and {k.shape[1]} of keys"
        raise ValueError(message("paged_attention", got, expected="a multiple of the heads of keys"))
    grouped = q.float().view(rows, k.shape[1], heads // k.shape[1], dim) * scale
    scores = grouped @ k.float().mT
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    keys = torch.arange(k.shape[2], device=q.device)
    mask = keys <= positions[:, None]
    if window is not None:
        mask &= keys > positions[:, None] - window
    weights = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
    return (weights @ v.float()).view(rows, heads, dim).to(q.dtype)
