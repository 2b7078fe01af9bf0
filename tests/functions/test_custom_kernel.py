"""Attention under the names that model libraries import, against the formula written out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from torch_xla.experimental.custom_kernel import FlashAttention, flash_attention

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 5, 7, 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sm_scale": 0.5},
    {"causal": True},
    {"segments": True},
    {"segments": True, "causal": True, "sm_scale": 0.3},
    {"bias": True, "sm_scale": 0.7},
    {"bias": True, "segments": True, "causal": True},
]


def inputs(bias: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(QUERIES, DIM), (KEYS, DIM), (KEYS, DIM)] + [(QUERIES, KEYS)] * bias
    return [torch.randn(BATCH, HEADS, *shape) for shape in shapes]


def segment_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Every query finds the first key in its own segment, so that no row is empty even under causality."""
    return torch.zeros(BATCH, QUERIES, dtype=torch.int64), torch.tensor([[0, 0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1]])


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ab: torch.Tensor | None = None,
    *,
    causal: bool = False,
    segments: bool = False,
    sm_scale: float = 1.0,
) -> torch.Tensor:
    scores = (q @ k.mT + (0 if ab is None else ab)) * sm_scale
    hidden = torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    if causal:
        hidden = hidden | ~torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    if segments:
        rows, columns = segment_ids()
        hidden = hidden | (rows[:, None, :, None] != columns[:, None, None, :])
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("form", [flash_attention, FlashAttention.apply])
def test_values_and_gradients(form: Any, options: dict[str, Any]) -> None:
    given = dict(options)
    host = [t.requires_grad_() for t in inputs(given.pop("bias", False))]
    expected = formula(*host, **given)
    expected.square().sum().backward()

    ours = [t.detach().to("xla").requires_grad_() for t in host]
    if given.pop("segments", False):
        given["q_segment_ids"], given["kv_segment_ids"] = (t.to("xla") for t in segment_ids())
    if len(ours) == 4:
        given["ab"] = ours[3]
    result = form(*ours[:3], **given)
    result.square().sum().backward()
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(ours, host, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    *qkv, ab = inputs(True)
    ours = flash_attention(*(t.to(dtype).to("xla") for t in qkv), ab=ab.to("xla"))
    assert ours.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(ours.cpu().float(), formula(*qkv, ab), rtol=tolerance, atol=tolerance)


def test_a_query_without_keys_is_zero() -> None:
    qkv = [t.to("xla") for t in inputs(False)]
    alone = torch.full((BATCH, QUERIES), 9, device="xla")
    result = flash_attention(*qkv, q_segment_ids=alone, kv_segment_ids=segment_ids()[1].to("xla"))
    assert torch.equal(result.cpu(), torch.zeros(BATCH, HEADS, QUERIES, DIM))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"q_segment_ids": torch.zeros(BATCH, QUERIES)}, "got only q_segment_ids"),
        ({"kv_segment_ids": torch.zeros(BATCH, KEYS)}, "got only kv_segment_ids"),
        (
            {"q_segment_ids": torch.zeros(BATCH, KEYS), "kv_segment_ids": torch.zeros(BATCH, KEYS)},
            r"got q_segment_ids of shape \(2, 7\), expected \(2, 5\)",
        ),
    ],
)
def test_refusals(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"\[flash_attention\] {complaint}"):
        flash_attention(*inputs(False), **arguments)


def test_the_form_of_a_function_takes_its_arguments_by_position() -> None:
    names = list(inspect.signature(flash_attention).parameters)
    assert list(inspect.signature(FlashAttention.apply).parameters) == names
    (q, k, v), ids = inputs(False), segment_ids()
    by_position = FlashAttention.apply(q, k, v, False, *ids, 0.5, None, None, None)
    assert torch.equal(by_position, flash_attention(q, k, v, False, *ids, 0.5))
