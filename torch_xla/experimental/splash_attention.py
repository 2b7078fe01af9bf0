"""Attention under the name of a TPU kernel of JAX, with sliding windows, segments and capped scores.

The work is done by the device's own operators: nothing here is specific to one kind of hardware.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla.distributed.spmd import Mesh
from torch_xla.distributed.spmd.marking import mark_sharding_with_gradients
from torch_xla.experimental.custom_kernel import flash_attention

Spec = tuple[tuple[str, ...] | str | None, ...]


@dataclass(eq=True, frozen=True)
class SplashAttentionConfig:
    """Settings of `splash_attention`, which takes them as `to_json` writes them.

    Args:
        sa_block_q: Not used: sizes of blocks and layouts are a matter of speed on TPUs, as are the others of ``sa_``.
        mesh: ``str(mesh)`` of the devices, or None where nothing is split.
        qkv_partition_spec: How queries, keys, values and the result are split over them, as for `mark_sharding`.
        segment_ids_partition_spec: The same of the segment ids.
        attentiontype_local_sliding: Whether a query sees only the keys around it.
        slide_window_size: How many to each side of it.
    """

    sa_block_q: int = 2048
    sa_block_kv: int = 2048
    sa_block_kv_compute: int = 2048
    sa_block_q_dkv: int = 2048
    sa_block_kv_dkv: int = 2048
    sa_block_kv_dkv_compute: int = 2048
    sa_block_q_dq: int = 2048
    sa_block_kv_dq: int = 2048
    sa_use_fused_bwd_kernel: bool = True
    sa_q_layout: str = "HEAD_DIM_MINOR"
    sa_k_layout: str = "HEAD_DIM_MINOR"
    sa_v_layout: str = "HEAD_DIM_MINOR"
    mesh: str | None = None
    qkv_partition_spec: Spec = (("data", "fsdp"), None, None, None)
    segment_ids_partition_spec: Spec = (("data", "fsdp"), None)
    attentiontype_local_sliding: bool = False
    slide_window_size: int | None = None

    def to_json(self) -> str:
        """The settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: str) -> SplashAttentionConfig:
        """The settings that `to_json` wrote."""
        return cls(**{name: _tuples(value) for name, value in json.loads(data).items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def splash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: str,
    decoder_segment_ids: torch.Tensor | None = None,
    causal: bool = True,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention ``softmax(q k^T) v`` over what a query may see, with gradients.

    Args:
        q: Queries, ``[batch, heads, L, dim]``; they are not scaled by their dimension.
        k: Keys, ``[batch, heads, S, dim]``.
        v: Values, ``[batch, heads, S, dim]``.
        config: A `SplashAttentionConfig` as text.
        decoder_segment_ids: Integers ``[batch, L]``; a query sees only the keys of its own segment.
        causal: Whether query i sees only the keys 0 to i.
        attn_logits_soft_cap: Scores become ``cap * tanh(score / cap)``.

    Returns:
        ``[batch, heads, L, dim]`` in the dtype of `q`.

    Raises:
        ValueError: A sliding window without a size.
    """
    settings = SplashAttentionConfig.from_json(config)
    mesh = None if settings.mesh is None else Mesh.from_str(settings.mesh)
    spec = settings.qkv_partition_spec
    if mesh is not None:
        q, k, v = (mark_sharding_with_gradients(tensor, mesh, spec) for tensor in (q, k, v))
    ids, window = decoder_segment_ids, None
    if ids is not None and ids.dim() == 0:
        ids = None
    if settings.attentiontype_local_sliding:
        window = settings.slide_window_size
        if window is None:
            raise ValueError(
                message("splash_attention", "got no slide_window_size", expected="one, for a local window")
            )
    if window is None and attn_logits_soft_cap is None:
        out = flash_attention(q, k, v, causal, ids, ids)
    else:
        out = _masked(q, k, v, causal, ids, window, attn_logits_soft_cap)
    return out if mesh is None else mark_sharding_with_gradients(out, mesh, spec)


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    ids: torch.Tensor | None,
    window: int | None,
    cap: float | None,
) -> torch.Tensor:
    ahead = torch.arange(k.shape[-2], device=q.device) - torch.arange(q.shape[-2], device=q.device)[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden = hidden | (ahead > 0)
    if window is not None:
        hidden = hidden | (ahead.abs() > window)
    if ids is not None:
        hidden = hidden | (ids[:, None, :, None] != ids[:, None, None, :])
    if cap is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=1.0)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = cap * torch.tanh(scores / cap)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype) @ v
