"""Calls that PyTorch's CPU kernels refuse although its Meta kernels accept them: the same error, at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import closely, on_both, refused_alike

from torch_xla.ops import checks

L = torch.linalg
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def _empty(device: str, *size: int) -> torch.Tensor:
    return torch.empty(size, device=device)


def _line(device: str) -> torch.Tensor:
    return torch.arange(6.0, device=device)


def _ones(device: str, dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.ones(size or (3, 3), dtype=dtype, device=device)


def _bytes(device: str) -> torch.Tensor:
    return _ones(device, torch.uint8)


def _zero(device: str) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _attend(d: str, shape: tuple[int, ...], mask: torch.Tensor | None = None) -> torch.Tensor:
    x = _ones(d, F32, *shape)
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)


REFUSED: dict[str, Callable[[str], Any]] = {
    "max of nothing": lambda d: _empty(d, 0).max(),
    "min along nothing": lambda d: _empty(d, 0, 3).min(0),
    "median along nothing": lambda d: _empty(d, 3, 0).median(-1),
    "mode of nothing": lambda d: _empty(d, 0).mode(),
    "pool of nothing": lambda d: torch.nn.functional.adaptive_avg_pool2d(_empty(d, 1, 2, 0, 4), 2),
    "read of nothing": lambda d: _empty(d, 0, 2).index_select(0, torch.zeros(1, dtype=torch.int64, device=d)),
    "add_ overlaps": lambda d: (x := _line(d))[1:].add_(x[:-1]),
    "copy_ overlaps": lambda d: (x := _line(d))[1:].copy_(x[:-1]),
    "out= overlaps": lambda d: torch.add((x := _line(d))[1:], 1, out=x[:-1]),
    "out= overlaps a list": lambda d: torch.cat([(x := _line(d))[:2], x[2:4]], out=x[1:5]),
    "floor of booleans": lambda d: _ones(d, torch.bool).floor(),
    "sort of complex numbers": lambda d: _ones(d, torch.complex64).sort(),
    "max of complex numbers": lambda d: _ones(d, torch.complex64).max(),
    "variance of integers": lambda d: _ones(d, torch.int64).var(),
    "frac of integers": lambda d: _ones(d, torch.int64).frac(),
    "relu of booleans": lambda d: _ones(d, torch.bool).relu(),
    "negative power of integers": lambda d: _ones(d, torch.int64) ** -1,
    "LU without pivots": lambda d: L.lu(_ones(d, torch.float32), pivot=False),
    "probability above 1": lambda d: _line(d).bernoulli_(2.0),
    "a number that does not fit": lambda d: _ones(d, torch.uint8).__setitem__(0, 300),
    "a complex number for real ones": lambda d: _line(d).fill_(1j),
    "integers to draw that do not fit": lambda d: _ones(d, torch.int8).random_(0, 300),
    "no integers to draw": lambda d: torch.randint(3, 3, (2,), device=d),
    # Types that an operator does not take.
    "product": lambda d: _ones(d, F32) @ _ones(d, F64),
    "product with integers": lambda d: torch.mm(_ones(d, F32), _ones(d, torch.int64)),
    "large product": lambda d: _ones(d, F32, 900, 900) @ _ones(d, BF16, 900, 900),
    "product and sum": lambda d: torch.addmm(_ones(d, F32), _ones(d, F32), _ones(d, BF16)),
    "product into another type": lambda d: torch.mm(_ones(d, F32), _ones(d, F32), out=_ones(d, F64)),
    "products summed up": lambda d: _ones(d, F32).addbmm(_ones(d, F32, 2, 3, 3), _ones(d, F64, 2, 3, 3)),
    "layer": lambda d: torch.nn.functional.linear(_ones(d, F32), _ones(d, F64)),
    "cross product": lambda d: L.cross(_ones(d, F32), _ones(d, BF16)),
    "convolution": lambda d: torch.conv1d(_ones(d, F32, 2, 3, 8), _ones(d, F64, 4, 3, 3)),
    "transposed convolution": lambda d: torch.conv_transpose1d(_ones(d, F64, 2, 3, 8), _ones(d, F32, 3, 4, 3)),
    "attention": lambda d: torch.nn.functional.scaled_dot_product_attention(
        _ones(d, F32, 1, 2, 3, 4), _ones(d, BF16, 1, 2, 3, 4), _ones(d, BF16, 1, 2, 3, 4)
    ),
    "index and values": lambda d: _ones(d, F32).index_put(
        (torch.zeros(1, dtype=torch.int64, device=d),), _line(d)[:3].double()
    ),
    "index that is no index": lambda d: _ones(d, F32).index_copy(0, _line(d)[:1], _ones(d, F32)[:1]),
    "mask of another shape": lambda d: _ones(d, F32).index_put(
        (torch.ones(2, dtype=torch.bool, device=d),), _line(d)[:3]
    ),
    "bits of floating-point numbers": lambda d: _ones(d, F32) & _ones(d, F32),
    "uniform integers": lambda d: _ones(d, torch.int64).uniform_(),
    "normal integers": lambda d: torch.normal(0.0, _ones(d, torch.int64)),
    "normal numbers into integers": lambda d: torch.normal(_line(d), _line(d), out=_ones(d, torch.int64, 6)),
    "probabilities that are integers": lambda d: torch.bernoulli(_ones(d, torch.int64)),
    "other probabilities that are integers": lambda d: _line(d).bernoulli_(_ones(d, torch.int32, 6)),
    "rates that are integers": lambda d: torch.poisson(_ones(d, torch.int64)),
    "counts that are integers": lambda d: torch.binomial(_ones(d, torch.int64), _ones(d, F32)),
    "random slopes of integers": lambda d: torch.nn.functional.rrelu(_ones(d, torch.int64), training=True),
    "mean slope of integers": lambda d: torch.nn.functional.rrelu(_ones(d, torch.int64)),
    "complex factor of a product": lambda d: _line(d).addcmul(_line(d), _line(d), value=1j),
    "complex factor of a quotient": lambda d: _line(d).addcdiv_(_line(d), _line(d), value=1j),
    "complex weight": lambda d: torch.lerp(_line(d), _line(d), 1j),
    "complex deviations": lambda d: torch.normal(0.5, _ones(d, torch.complex64)),
    "counts and probabilities of other shapes": lambda d: torch.binomial(_line(d), _line(d)[:4]),
    "logits in integers": lambda d: _ones(d, torch.int64).logit_(),
    "any, into integers": lambda d: torch.any(_line(d), (0,), out=_ones(d, torch.int64, 1)[0]),
    "norms of integer embeddings": lambda d: torch.embedding_renorm_(
        _ones(d, torch.int64), torch.zeros(2, dtype=torch.int64, device=d), 0.5, 2.0
    ),
    "loss of integer targets, backward": lambda d: torch.nn.functional.huber_loss(
        _line(d).requires_grad_(), _ones(d, torch.int64, 6)
    ).backward(),
    "in place and with a lost sign": lambda d: (
        torch.nn.functional.leaky_relu_(_line(d).requires_grad_() * 1, -1.0).sum().backward()
    ),
    "negative slope, after another slope": lambda d: [
        torch.nn.functional.leaky_relu_(_line(d).requires_grad_() * 1, slope).sum().backward() for slope in (0.5, -0.5)
    ],
    "a type that the kernel of the host lacks": lambda d: L.ldl_factor(_ones(d, BF16)),
    "a histogram of complex numbers": lambda d: torch.histc(_ones(d, torch.complex64)),
    "a loss of integers, with classes": lambda d: torch.nn.functional.multilabel_margin_loss(
        _ones(d, torch.int64, 2, 3), torch.zeros(2, 3, dtype=torch.int64, device=d)
    ),
    "dropout of integers": lambda d: torch.native_dropout(_ones(d, torch.int64), 0.5, True),
    "dropout of more than all": lambda d: torch.native_dropout(_line(d), 2.0, True),
    "any of half precision, into integers": lambda d: torch.any(_ones(d, BF16), out=_ones(d, torch.int64, 1)[0]),
    "an assertion": lambda d: torch._assert_async(_line(d)[0], "said"),
    "an assertion of several": lambda d: torch._assert_async(_line(d)),
    "distances": lambda d: torch.cdist(_ones(d, F32), _ones(d, F64)),
    # Numbers, after others of which the kernel took the same call.
    "ends of a histogram": lambda d: [torch.histc(_line(d), 4, *ends) for ends in ((0.0, 1.5), (5.0, 1.5))],
    "a histogram without end": lambda d: [torch.histc(_line(d), 4, 0.5, end) for end in (1.5, torch.inf)],
    "largest norm": lambda d: [torch.renorm(_ones(d, F32), 2, 0, most) for most in (1.5, -1.5)],
    "width of a shrink": lambda d: [torch.nn.functional.softshrink(_line(d), by) for by in (0.5, -0.5)],
    "shrink of booleans": lambda d: torch.nn.functional.softshrink(_ones(d, torch.bool)),
    "integers as a mask": lambda d: _attend(d, (2, 3, 4), mask=_ones(d, torch.int64)),
    "a mask in half precision": lambda d: _attend(d, (2, 3, 4), mask=_ones(d, torch.float16)),
    "attention of vectors": lambda d: _attend(d, (4,)),
    "number for a mask": lambda d: [_bytes(d).masked_fill(_ones(d, torch.bool), n) for n in (7, 300)],
    "number for a row": lambda d: [_bytes(d).index_fill(0, _zero(d), n) for n in (7, 300)],
    "bound of bytes": lambda d: [_bytes(d).clamp(max=n) for n in (7, 300)],
    "number to scatter": lambda d: [_bytes(d).scatter(0, _zero(d)[:, None], n) for n in (7, 300)],
    "factor of bytes": lambda d: [torch.add(_bytes(d), _bytes(d), alpha=n) for n in (2, 300)],
    "factor of half precision": lambda d: [
        _ones(d, torch.float16).add(_ones(d, torch.float16), alpha=n) for n in (2.5, 1e6)
    ],
    "factor without end": lambda d: [_ones(d, F32).sub(_ones(d, F32), alpha=n) for n in (2.5, 1e300)],
    "power of integers": lambda d: [_ones(d, torch.int64) ** n for n in (2, 3, -2)],
    "exponent of a loss": lambda d: [
        torch.nn.functional.multi_margin_loss(_ones(d, F32), _zero(d).expand(3), p=n) for n in (1, 2, 3)
    ],
    "negative slope in place": lambda d: [
        torch.nn.functional.elu_(_line(d).requires_grad_() * 1, slope).sum().backward() for slope in (0.5, -2.0)
    ],
    "negative slope of another in place": lambda d: (
        torch.nn.functional.celu_(_line(d).requires_grad_() * 1, -2.0).sum().backward()
    ),
    "division of integers by the number 0": lambda d: _ones(d, torch.int64) // 0,
    # What a Meta kernel does not look at.
    "factor of integers": lambda d: _ones(d, torch.int64).add_(_ones(d, torch.int64), alpha=1.5),
    "factor of booleans": lambda d: torch.add(_ones(d, torch.bool), _ones(d, torch.bool), alpha=1.5),
    "side of a search": lambda d: torch.searchsorted(_line(d), _line(d), side="bad"),
    "padding of six dimensions": lambda d: torch.ops.aten.reflection_pad3d(_ones(d, F32, 3, 3, 9, 9, 9, 9), (2,) * 6),
    "another padding of six": lambda d: torch.ops.aten.replication_pad3d(_ones(d, F32, 3, 3, 9, 9, 9, 9), (2,) * 6),
    # Values that are asked for.
    "inverse of nothing": lambda d: L.inv_ex(torch.zeros(3, 3, device=d), check_errors=True),
    "inverses, of which one is of nothing": lambda d: L.inv_ex(
        torch.stack([torch.eye(3), torch.zeros(3, 3)]).to(d), check_errors=True
    ),
    "root of a negative matrix": lambda d: L.cholesky_ex(-torch.eye(3, device=d), check_errors=True),
    "factors of nothing": lambda d: L.lu_factor_ex(torch.zeros(3, 3, device=d), check_errors=True),
    "solution of nothing": lambda d: L.solve_ex(torch.zeros(3, 3, device=d), _ones(d, F32), check_errors=True),
    # Sizes that overflow.
    "too many elements": lambda d: torch.empty(2**62, device=d),
    "too many bytes": lambda d: torch.empty(2**61, dtype=F64, device=d),
    "too many of three sizes": lambda d: torch.empty((2**31, 2**31, 4), device=d),
    "a view of too many": lambda d: _line(d).as_strided((2**62 + 1,), (4,)),
    "a view with too wide strides": lambda d: _line(d).as_strided((2,), (2**63 - 1,)),
    "a view that wraps around": lambda d: _line(d).as_strided((2**62,), (4,)),
    "a view from too far": lambda d: _line(d).as_strided((1,), (1,), 2**62),
    "a view of fewer than none": lambda d: _line(d).as_strided((-1,), (1,)),
    "a view from before the beginning": lambda d: _line(d).as_strided((1,), (1,), -1),
    "a storage of too many": lambda d: _empty(d, 0).set_(_line(d).untyped_storage(), 0, (2**62,), (4,)),
    "a storage backwards": lambda d: _empty(d, 0).set_(_line(d).untyped_storage(), 3, (2,), (-1,)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_refused_at_the_call_as_on_cpu(call):
    refused_alike(call)


ACCEPTED: dict[str, Callable[[str], Any]] = {
    "even and odd": lambda d: (x := _line(d))[::2].add_(x[1::2]),
    "the same elements": lambda d: (x := _line(d)).add_(x.view(6)),
    "apart": lambda d: (x := _line(d))[3:].mul_(x[:3]),
    "sum of nothing": lambda d: _empty(d, 0, 3).sum(0),
    "median of nothing": lambda d: _empty(d, 0).median(),
    "division of zeros by data": lambda d: _ones(d, torch.int64) // (_ones(d, torch.int64) + 1),
    "sum of a double and a single": lambda d: _ones(d, F64) + _ones(d, F32),
    "norm of half precision with parameters in single": lambda d: torch.native_layer_norm(
        _ones(d, BF16), [3], _line(d)[:3], _line(d)[3:], 1e-5
    )[0],
    "shift of booleans": lambda d: _ones(d, torch.bool) << 1,
    "complex factor of complex numbers": lambda d: (x := _ones(d, torch.complex64)).addcmul(x, x, value=1j),
    "solution into nothing": lambda d: L.solve_ex(
        torch.eye(3, device=d) * 2, _ones(d, F32), check_errors=True, out=(_empty(d, 0), _empty(d, 0).int())
    )[0],
    "nansum over all": lambda d: _ones(d, F32).nansum([]),
    "nansum of nothing": lambda d: _empty(d, 0, 3).nansum([]),
    "an assertion that holds": lambda d: torch._assert_async(_line(d)[1], "said") or _line(d),
    "ceil of half precision": lambda d: _ones(d, torch.float16).ceil(),
    "magnitudes of complex numbers, into such": lambda d: torch.abs(
        _ones(d, torch.complex64) * -2, out=_ones(d, torch.complex64)
    ),
    "bound of floats in bytes": lambda d: _bytes(d).gt(0.5),
    "no bound": lambda d: _line(d).masked_fill(_line(d) > 2, -torch.inf),
    "inverse that is checked": lambda d: L.inv_ex(2 * torch.eye(3, device=d), check_errors=True)[0],
    "view of nothing in bytes": lambda d: torch.ones(4, 0, device=d).view(torch.uint8),
    "view of nothing as complex numbers": lambda d: torch.view_as_complex(torch.ones(0, 2, device=d)),
    "maximum of large numbers": lambda d: torch.zeros(2, dtype=torch.uint64, device=d).fill_(2**63 + 5),
    "vmap of a write to a view": lambda d: torch.func.vmap(torch.func.functionalize(_write_view))(_ones(d, F32)),
}


def _write_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    y[:1].add_(1)
    return y


@pytest.mark.parametrize("call", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted_as_on_cpu(call):
    torch.testing.assert_close(call("xla").cpu(), call("cpu"), equal_nan=True)


OUT: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, out: torch.matmul(x, x, out=out),
    "linear": lambda x, out: torch.ops.aten.linear.out(x, x, out=out),
    "kron": lambda x, out: torch.kron(x, x[:1, :1], out=out),
}


@pytest.mark.parametrize("call", OUT.values(), ids=OUT.keys())
def test_out_has_no_gradient(call):
    for device in ("cpu", "xla"):
        x, out = _ones(device, F32).requires_grad_(), torch.empty(3, 3, device=device)
        with pytest.raises(RuntimeError, match="arguments don't support automatic differentiation"):
            call(x, out)
        with torch.no_grad():
            call(x, out)
    assert torch.equal(out.cpu(), call(_ones("cpu", F32), torch.empty(3, 3)))


def test_bags_of_other_dimensions_are_refused():
    weight, index = torch.ones(3, 3, device="xla"), torch.zeros(3, 3, dtype=torch.int64, device="xla")
    with pytest.raises(ValueError, match="input has to be a 1D Tensor, but got Tensor of dimension 2"):
        torch.embedding_bag(weight, index, index[0])
    with pytest.raises(ValueError, match="offsets has to be a 1D Tensor, but got Tensor of dimension 2"):
        torch.embedding_bag(weight, index[0], index)


def test_the_generator_of_the_host_is_not_drawn_from():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    torch.ones(3, dtype=torch.int64, device="xla").random_(5)
    torch.zeros(0, device="xla").normal_()
    assert torch.equal(torch.rand(2), expected)


def test_equal_wants_one_device():
    with pytest.raises(RuntimeError, match="at least two devices, xla:0 and cpu"):
        torch.equal(torch.ones(2, device="xla"), torch.ones(2))


@pytest.mark.parametrize("gradient_of", [L.det, lambda a: L.slogdet(a)[1]], ids=["det", "slogdet"])
@on_both(closely)
def test_gradient_of_a_determinant_whatever_the_strides(device, gradient_of):
    leaf = (torch.arange(9.0).reshape(3, 3) + 4 * torch.eye(3)).to(device).t().requires_grad_()
    gradient_of(leaf).backward()
    return leaf.grad


def test_a_number_is_asked_about_once(monkeypatch):
    asked = []
    check = checks.check_call
    monkeypatch.setattr(checks, "check_call", lambda op, *rest: asked.append(op) or check(op, *rest))
    x, y = torch.ones(5, 3, device="xla"), torch.ones(5, 3, dtype=torch.uint8, device="xla")
    for number in (0.5, 0.7, 0.5, 0.7):
        torch.renorm(x, 2, 0, number)
        torch.lerp(x, x, number)
        y.clamp(max=int(10 * number))
    assert sorted(asked) == ["aten.clamp.default"] + ["aten.lerp.Scalar"] + ["aten.renorm.default"] * 2
