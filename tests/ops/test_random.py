"""Random numbers: ranges, moments, types and shapes, since no two generators agree on values."""

from __future__ import annotations

import pytest
import torch
from harness import lower

from torch_xla.ops import call

A = torch.ops.aten
N = 20000
LIKE = torch.ones(100, 200)


def draw(op, *args, **kwargs):
    assert call.way_of(str(op)) == "rule"
    drawn, *_ = lower(op, *args, **kwargs)
    assert drawn.numel() == 0 or drawn.is_complex() or drawn.isfinite().all()
    return drawn


UNIFORM = [
    (A.rand.default, ([N],), {}, 0, 1),
    (A.rand.default, ([N],), {"dtype": torch.bfloat16}, 0, 1),
    (A.rand.default, ([N],), {"dtype": torch.float16}, 0, 1),
    (A.rand.default, ([N],), {"dtype": torch.float64}, 0, 1),
    (A.rand_like.default, (LIKE,), {}, 0, 1),
    (A.uniform.default, (LIKE, -2.0, 3.0), {}, -2, 3),
    (A.uniform.default, (LIKE.bfloat16(), -2.0, 3.0), {}, -2, 3),
]


@pytest.mark.parametrize("op, args, kwargs, low, high", UNIFORM, ids=lambda x: str(x) if not x else None)
def test_uniform(op, args, kwargs, low, high):
    drawn = draw(op, *args, **kwargs)
    assert drawn.min() >= low and drawn.max() < high
    assert drawn.double().mean().item() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))
    assert drawn.double().std().item() == pytest.approx((high - low) / 12**0.5, rel=0.05)


MOMENTS = [
    (A.randn.default, ([N],), {}, 0, 1),
    (A.randn.default, ([N],), {"dtype": torch.float64}, 0, 1),
    (A.randn_like.default, (LIKE,), {}, 0, 1),
    (A.normal_functional.default, (LIKE, 3.0, 2.0), {}, 3, 2),
    (A.normal.Tensor_Tensor, (LIKE, LIKE * 2), {}, 1, 2),
    (A.normal.Tensor_float, (LIKE, 2.0), {}, 1, 2),
    (A.normal.float_Tensor, (1.0, LIKE), {}, 1, 1),
    (A.normal.float_float, (1.0, 2.0, [N]), {}, 1, 2),
    (A.exponential.default, (LIKE, 2.0), {}, 0.5, 0.5),
    (A.geometric.default, (LIKE, 0.3), {}, 1 / 0.3, 0.7**0.5 / 0.3),
    (A.log_normal.default, (LIKE, 0.0, 0.5), {}, 1.1331, 0.6039),
    (A.poisson.default, (LIKE * 4,), {}, 4, 2),
    (A.binomial.default, (LIKE * 10, LIKE * 0.3), {}, 3, 2.1**0.5),
]


@pytest.mark.parametrize("op, args, kwargs, mean, std", MOMENTS)
def test_moments(op, args, kwargs, mean, std):
    drawn = draw(op, *args, **kwargs).double()
    assert drawn.mean().item() == pytest.approx(mean, abs=0.05 * std)
    assert drawn.std().item() == pytest.approx(std, rel=0.05)


def test_complex_normal_has_unit_variance():
    drawn = draw(A.randn.default, [N], dtype=torch.complex64)
    assert drawn.abs().square().mean().item() == pytest.approx(1, rel=0.05)


random_from = getattr(A.random, "from")
INTEGERS = [
    (A.randint.default, (7, [N]), {}, 0, 6),
    (A.randint.low, (-3, 4, [N]), {"dtype": torch.float32}, -3, 3),
    (A.randint_like.low_dtype, (LIKE, -3, 4), {}, -3, 3),
    (A.random.default, (LIKE.to(torch.uint8),), {}, 0, 255),
    (A.random.default, (LIKE.bfloat16(),), {}, 0, 256),
    (A.random.to, (LIKE.int(), 7), {}, 0, 6),
    (random_from, (LIKE, 2, 9), {}, 2, 8),
]


@pytest.mark.parametrize("op, args, kwargs, low, high", INTEGERS)
def test_integers(op, args, kwargs, low, high):
    drawn = draw(op, *args, **kwargs).double()
    assert (drawn.min(), drawn.max()) == (low, high)
    assert torch.equal(drawn, drawn.round())
    assert drawn.mean().item() == pytest.approx((low + high) / 2, abs=0.03 * (high - low))


def test_full_range_of_int64():
    assert draw(random_from, LIKE.long(), -(2**63), None).double().std() > 5e18


@pytest.mark.parametrize("n", [0, 1, 500])
def test_randperm(n):
    assert torch.equal(draw(A.randperm.default, n).sort()[0], torch.arange(n))
    out = torch.zeros(n, dtype=torch.int32)
    assert torch.equal(draw(A.randperm.generator_out, n, generator=None, out=out).sort()[0], torch.arange(n).int())


@pytest.mark.parametrize(
    "op, args",
    [
        (A.bernoulli.default, (LIKE * 0.3,)),
        (A.bernoulli.p, (LIKE, 0.3)),
        (A.bernoulli.Tensor, (LIKE.long(), LIKE * 0.3)),
    ],
)
def test_bernoulli(op, args):
    drawn = draw(op, *args).double()
    assert set(drawn.unique().tolist()) == {0, 1}
    assert drawn.mean().item() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.float32])
def test_bernoulli_into_a_tensor_of_any_type(dtype):
    p = torch.full((2000,), 0.3).to("xla")
    drawn = torch.empty(2000, dtype=dtype, device="xla")
    assert torch.bernoulli(p, out=drawn) is drawn and drawn.dtype == dtype
    assert drawn.double().mean().item() == pytest.approx(0.3, abs=0.05)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.bernoulli(p[:5], out=drawn)
    assert drawn.shape == (5,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype):
    kept, mask = lower(A.native_dropout.default, LIKE.to(dtype), 0.25, True)
    assert mask.double().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(kept, (mask / 0.75).to(dtype))
    torch.testing.assert_close(lower(A.native_dropout_backward.default, LIKE.to(dtype), mask, 1 / 0.75)[0], kept)


def test_dropout_of_complex_numbers():
    kept, mask = torch.native_dropout(torch.ones(200, dtype=torch.complex64, device="xla"), 0.5, None)
    assert 50 < mask.sum().item() < 150
    assert torch.equal(kept.cpu(), mask.cpu() * torch.tensor(2.0, dtype=torch.complex64))


@pytest.mark.parametrize("p, train, expected", [(0.5, False, 1.0), (1.0, True, 0.0), (0.0, True, 1.0)])
def test_dropout_without_chance(p, train, expected):
    kept, mask = lower(A.native_dropout.default, LIKE, p, train)
    assert torch.equal(kept, LIKE * expected) and torch.equal(mask, LIKE.bool() & bool(expected))


def test_rrelu():
    drawn, noise = lower(A.rrelu_with_noise_functional.default, -LIKE, LIKE, 0.1, 0.3, True)
    assert torch.equal(drawn, -noise) and noise.min() >= 0.1 and noise.max() <= 0.3
    drawn, _ = lower(A.rrelu_with_noise_functional.default, -LIKE, LIKE, 0.1, 0.3, False)
    torch.testing.assert_close(drawn, -0.2 * LIKE)


def test_exponential_is_never_zero():
    assert draw(A.exponential.default, LIKE, 1.0).min() > 0


def test_cauchy():
    assert draw(A.cauchy.default, LIKE, 1.0, 0.1).median().item() == pytest.approx(1, abs=0.01)


def test_dirichlet():
    """A quotient of gamma draws, so it covers those too."""
    torch.testing.assert_close(draw(A._sample_dirichlet.default, torch.ones(5, 3)).sum(1), torch.ones(5))


def test_multinomial():
    weights = torch.tensor([0.1, 0.2, 0.0, 0.7])
    counts = draw(A.multinomial.default, weights, N, True).bincount(minlength=4) / N
    torch.testing.assert_close(counts, weights, atol=0.02, rtol=0)
    without = draw(A.multinomial.default, weights.expand(50, 4), 3, False)
    assert torch.equal(without.sort(1)[0], torch.tensor([0, 1, 3]).expand(50, 3))
