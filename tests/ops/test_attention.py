"""Fused attention and its gradient."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from harness import lower, values

import torch_xla
from torch_xla._core.lower import lowering
from torch_xla.ops import attention

A = torch.ops.aten
FUSED = A._scaled_dot_product_fused_attention_overrideable.default
FUSED_BACKWARD = A._scaled_dot_product_fused_attention_overrideable_backward.default
FLASH = A._scaled_dot_product_flash_attention_for_cpu
TOL = {"rtol": 1e-4, "atol": 1e-4}


def example(dtype=torch.float32, heads=3):
    return torch.randn(2, 3, 5, 8).to(dtype), *(torch.randn(2, heads, 7, 8).to(dtype) for _ in range(2))


@values
def test_values():
    for dtype in (torch.float32, torch.bfloat16):
        for mask, is_causal in ((None, False), (None, True), ("bool", False), ("float", False)):
            q, k, v = example(dtype)
            bias = {None: None, "bool": torch.rand(5, 7) > 0.3, "float": torch.randn(2, 1, 5, 7).to(dtype)}[mask]
            yield A.scaled_dot_product_attention.default, q, k, v, bias, 0.0, is_causal
            if mask != "bool":
                yield FLASH.default, q, k, v, 0.0, is_causal, {"attn_mask": bias, "scale": 0.3}
    yield A.scaled_dot_product_attention.default, *example(heads=1), {"enable_gqa": True}
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False  # a row with nothing to attend to is zero
    yield A.scaled_dot_product_attention.default, *example(), mask
    for is_causal in (False, True):
        q, k, v = example()
        out, logsumexp = FLASH.default(q, k, v, 0.0, is_causal)
        args = (torch.randn_like(out), q, k, v, out, logsumexp, 0.0, is_causal)
        yield A._scaled_dot_product_flash_attention_for_cpu_backward.default, *args


@pytest.mark.parametrize("heads", [3, 1])
def test_fused_backward_is_the_gradient_of_the_fused_forward(heads):
    inputs = [x.requires_grad_() for x in (*example(heads=heads), torch.randn(1, 3, 5, 7))]
    expected = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
    q, k, v, bias = (x.detach() for x in inputs)
    # The Meta kernel that promises shapes has no grouped heads.
    if heads != 3:
        k, v = k.expand(2, 3, 7, 8), v.expand(2, 3, 7, 8)
    out, logsumexp, _, _, _, _, seed, offset, _ = lower(FUSED, q, k, v, bias)
    torch.testing.assert_close(out, expected.detach(), **TOL)
    grad = torch.randn_like(out)
    grads = lower(
        FUSED_BACKWARD,
        *(grad, q, k, v, bias, [True] * 4, out, logsumexp, None, None, 5, 7, 0.0, False, seed, offset),
    )
    reference = list(torch.autograd.grad(expected, inputs, grad))
    if heads != 3:
        grads[1], grads[2] = (g.sum(1, keepdim=True) for g in grads[1:3])
    torch.testing.assert_close(grads, reference, **TOL)


def test_fused_dropout_keeps_the_mean_and_repeats_in_the_backward():
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 64, 8)
    v = torch.ones(1, 1, 64, 8)
    out, logsumexp, _, _, _, _, seed, offset, _ = lower(FUSED, q, k, v, None, 0.5)
    assert (out[..., 0] != 1).any() and abs(out.mean().item() - 1) < 0.5
    grads = lower(
        FUSED_BACKWARD,
        *(torch.ones_like(out), q, k, v, torch.zeros(4, 64), [True] * 3 + [False]),
        *(out, logsumexp, None, None, 4, 64, 0.5, False, seed, offset),
    )
    # With all-one values the gradient by v sums the kept probabilities, whose row sums are the output.
    torch.testing.assert_close(grads[2][..., 0].sum(), out[..., 0].sum(), **TOL)


def attend(device, shapes, mask=None, dtype=torch.float32, **kwargs):
    """Output and gradients through the whole stack."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(s, dtype=dtype).to(device).requires_grad_() for s in shapes)
    out = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask.to(device), **kwargs)
    weights = torch.linspace(-1, 1, out.shape[-1], dtype=dtype).to(device)
    grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch_xla.sync()
    return [t.detach().cpu() for t in (out, *grads)]


CASES = {
    "2-d": ([(5, 8), (7, 8), (7, 6)], None, {}),
    "3-d": ([(3, 5, 8), (3, 7, 8), (3, 7, 6)], (3, 5, 7), {}),
    "3-d, one mask": ([(3, 5, 8), (3, 7, 8), (3, 7, 8)], (5, 7), {"scale": 0.2}),
    "5-d": ([(2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8)], None, {"is_causal": True}),
    "5-d, masked": ([(2, 3, 2, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 8)], (2, 1, 1, 5, 7), {}),
    "grouped": ([(2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)], None, {"enable_gqa": True}),
    "no rows": ([(2, 2, 0, 8), (2, 2, 7, 8), (2, 2, 7, 8)], None, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_dimensions_is_one_operator(case):
    shapes, masked, kwargs = CASES[case]
    mask = None if masked is None else torch.rand(masked) > 0.4
    if mask is not None:
        mask[..., 1, :] = False
    torch.testing.assert_close(attend("xla", shapes, mask, **kwargs), attend("cpu", shapes, mask, **kwargs), **TOL)
    q, k, v = (torch.randn(s, device="xla") for s in shapes)
    text = torch_xla._XLAC._get_xla_tensors_text(
        [F.scaled_dot_product_attention(q, k, v, None if mask is None else mask.to("xla"), **kwargs)]
    )
    nodes = [line.split(", at ")[0] for line in text.splitlines()]
    assert sum("attention" in node for node in nodes) == 1 and not any("softmax" in node for node in nodes)


MASKS = [(), (7,), (5,), (1, 7), (4, 7), (5, 7), (2, 5, 7), (3, 5, 7), (2, 1, 5, 7), (3, 1, 5, 7), (1, 2, 3, 5, 7)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch", [(2, 3), (3,)])
def test_masks_are_taken_or_refused_as_on_the_cpu(shape, is_causal, batch):
    shapes = [(*batch, 5, 8), (*batch, 7, 8), (*batch, 7, 8)]
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    keep = (numbers > -0.5).index_fill(-1, torch.tensor(0), True)  # no row is masked whole
    for mask in (numbers, keep):
        try:
            expected = attend("cpu", shapes, mask, is_causal=is_causal)
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error), match="^" + re.escape(str(error))):
                attend("xla", shapes, mask, is_causal=is_causal)
        else:
            torch.testing.assert_close(attend("xla", shapes, mask, is_causal=is_causal), expected, **TOL)


@pytest.mark.parametrize("mask", [None, "rows", "columns", "causal"])
def test_long_sequences_are_taken_in_parts(mask, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", 64)
    monkeypatch.setattr(attention, "_ROWS", 16)
    monkeypatch.setattr(lowering, "_rules", {})
    shapes = [(2, 3, 37, 8), (2, 3, 29, 8), (2, 3, 29, 8)]
    keep = {"rows": torch.rand(37, 29) > 0.3, "columns": torch.rand(2, 1, 1, 29) > 0.3}.get(mask)
    kwargs = {"is_causal": mask == "causal"}
    torch.testing.assert_close(attend("xla", shapes, keep, **kwargs), attend("cpu", shapes, keep, **kwargs), **TOL)


def test_no_array_of_all_scores_for_long_sequences():
    q, k, v = (torch.randn(1, 2, 4096, 16, device="xla", requires_grad=True) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    text = torch_xla._XLAC._get_stablehlo([q.grad, k.grad, v.grad]).decode()
    assert "256x4096x" in text and "4096x4096x" not in text


@pytest.mark.parametrize("is_causal", [False, True])
def test_doubles_keep_their_precision_in_the_gradient(is_causal):
    shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)]
    ours, theirs = (attend(d, shapes, dtype=torch.float64, is_causal=is_causal) for d in ("xla", "cpu"))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
