"""Products with integer weights."""

from __future__ import annotations

import pytest
import torch
from harness import check, lower

import torch_xla.experimental.custom_kernel  # noqa: F401
from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear

OPERATOR = torch.ops.xla.quantized_matmul.default


def weights(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, dtype=torch.int8)


def in_words(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
    """A product with the numbers that the weights stand for."""
    if w.dim() == 3:
        return x @ (w * scale[:, None] - zero_point[:, None]).flatten(0, 1)
    return x @ (w * scale[:, None] - zero_point[:, None]).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize(
    ("rows", "w", "factors", "options"),
    [
        ((2, 3), weights(8, 5, 6), (5,), {}),
        ((3,), weights(8, 5, 6), (5,), {"quantize_activation": True}),
        ((), weights(4, 5, 6), (5,), {"int4_weight": True}),
        ((2, 3), weights(8, 3, 2, 5), (3, 5), {"block_size": 2}),
        ((2,), weights(4, 3, 2, 5), (3, 5), {"block_size": 2, "int4_weight": True}),
    ],
)
def test_products(dtype, with_zero, rows, w, factors, options):
    x, scale, zero_point = torch.randn(*rows, 6), torch.rand(factors) / 100, torch.rand(factors) / 10
    exact = in_words(x, w, scale, zero_point if with_zero else torch.zeros(factors))
    x, scale, zero_point = (t.to(dtype) for t in (x, scale, zero_point))
    given = (x, w, scale, zero_point if with_zero else None)
    check(OPERATOR, *given, **options)
    rounding = 1e-5 if dtype == torch.float32 and not options.get("quantize_activation") else 0.1
    torch.testing.assert_close(OPERATOR(*given, **options).float(), exact, rtol=0, atol=rounding)


def test_factors_wider_than_the_rows_widen_the_result():
    given = torch.randn(2, 6).bfloat16(), weights(8, 5, 6), torch.rand(5)
    (result,) = lower(OPERATOR, *given)
    torch.testing.assert_close(result, OPERATOR(*given), rtol=1e-2, atol=1e-2)


def test_gradients_are_those_of_the_product():
    x, w, scale, zero_point = torch.randn(4, 6), weights(8, 5, 6), torch.rand(5) / 100, torch.rand(5) / 10
    grads = []
    for device, product in (("cpu", in_words), ("cpu", OPERATOR), ("xla", OPERATOR)):
        given = [t.detach().to(device).requires_grad_() for t in (x, scale, zero_point)]
        product(given[0], w.to(device), *given[1:]).pow(2).sum().backward()
        grads.append([t.grad.cpu() for t in given])
    for actual in grads[1:]:
        torch.testing.assert_close(actual, grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_is_one_operator(compiled, counted):
    layer = XlaQuantizedLinear(6, 5, is_symmetric=True, quantize_activation=True)
    layer.load_quantized_weight(weights(8, 5, 6), torch.rand(5))
    x = torch.randn(3, 6)
    expected = layer(x)
    layer.to("xla")
    run = torch.compile(layer, backend="openxla") if compiled else layer
    with counted("xla::quantized_matmul", 1), torch.no_grad():
        result = run(x.to("xla"))
    torch.testing.assert_close(result.cpu(), expected)
    int8 = torch.ops.xla.quantized_matmul_int8(x.bfloat16(), layer.weight.cpu(), layer.weight_scaler.cpu())
    assert int8.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("w", "factors", "options", "match"),
    [
        (torch.zeros(5, 6), (5,), {}, "weights of torch.float32, expected torch.int8"),
        (weights(8, 5, 4), (5,), {}, r"weights of shape \[5, 4\], expected \[columns, 6\]"),
        (weights(8, 5, 6), (6,), {}, r"scale of shape \[6\], expected \[5\]"),
        (weights(8, 2, 2, 5), (2, 5), {"block_size": 2}, r"weights of shape \[2, 2, 5\]"),
        (
            weights(8, 3, 2, 5),
            (3, 5),
            {"block_size": 2, "quantize_activation": True},
            "quantize_activation with blocks",
        ),
    ],
)
def test_weights_that_do_not_fit(w, factors, options, match):
    for device in ("cpu", "xla"):
        with pytest.raises(AssertionError, match=rf"\[quantized_matmul\] got .*{match}"):
            OPERATOR(torch.randn(2, 6, device=device), w.to(device), torch.rand(factors, device=device), **options)
