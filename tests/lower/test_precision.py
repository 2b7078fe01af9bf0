"""The precision of float32 products: PyTorch's settings, the package's own, and that a program is compiled for each."""

from __future__ import annotations

import re

import pytest
import torch

import torch_xla
from torch_xla import _XLAC, backends
from torch_xla.experimental.assume_pure import assume_pure
from torch_xla.experimental.scan import scan
from torch_xla.ops import precision

pytestmark = pytest.mark.optimized("products and their sums may be rounded at once")


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_float32_matmul_precision()
    precision.choose(None)
    yield
    torch.set_float32_matmul_precision(before)
    precision.choose(None)


def lowered(convolution=False):
    """The StableHLO line of a product, or of a convolution and its gradients."""
    if convolution:
        x, w = torch.ones(1, 2, 5, 5, device="xla"), torch.ones(3, 2, 3, 3, device="xla", requires_grad=True)
        out = torch.nn.functional.conv2d(x, w)
        tensors = [out, *torch.autograd.grad(out.sum(), w)]
    else:
        tensors = [torch.ones(3, 4, device="xla") @ torch.ones(4, 5, device="xla")]
    lines = _XLAC._get_stablehlo(tensors).decode().splitlines()
    return [line for line in lines if f"stablehlo.{'convolution' if convolution else 'dot_general'}" in line]


@pytest.mark.parametrize(("setting", "level"), [("highest", "HIGHEST"), ("high", "HIGH"), ("medium", "DEFAULT")])
def test_pytorchs_setting(setting, level):
    torch.set_float32_matmul_precision(setting)
    (product,) = lowered()
    assert f"precision = [{level}, {level}]" in product


@pytest.mark.parametrize(("setting", "level"), [("highest", "HIGHEST"), ("high", "HIGH"), ("medium", "DEFAULT")])
def test_functions_that_are_traced_have_it_too(setting, level):
    torch.set_float32_matmul_precision(setting)
    x, w = torch.ones(3, 2, 2, device="xla"), torch.ones(2, 2, device="xla", requires_grad=True)
    _, products = scan(lambda carry, x: (carry, x @ carry), w, x)
    (gradient,) = torch.autograd.grad(products.sum(), w)
    inlined = assume_pure(torch.mm)(x[0], w)
    text = _XLAC._get_stablehlo([products, gradient, inlined]).decode()
    assert set(re.findall(r"precision = \[(\w+), (\w+)\]", text)) == {(level, level)}


def test_convolutions_have_a_setting_of_their_own():
    for allowed, level in ((True, "HIGH>"), (False, "HIGHEST>")):
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            convolutions = lowered(convolution=True)
        assert len(convolutions) == 2 and all(line.count(f"precision {level}") == 2 for line in convolutions)


@pytest.mark.parametrize("level", ["default", "high", "highest"])
def test_the_packages_setting_comes_first(level, capsys):
    torch.set_float32_matmul_precision("high")
    backends.set_mat_mul_precision(level)
    assert capsys.readouterr().err == backends._WARNING_MESSAGE + "\n"
    assert backends.get_mat_mul_precision() == _XLAC._xla_get_mat_mul_precision() == level
    (product,) = lowered()
    assert f"precision = [{level.upper()}, {level.upper()}]" in product


def test_each_precision_is_a_program_of_its_own(compiles):
    def step():
        (torch.ones(64, 64, device="xla") @ torch.ones(64, 64, device="xla")).sum()
        x = torch.arange(40000.0, device="xla").reshape(200, 200)
        out = x @ x
        torch_xla.sync()
        return out.sum().item()

    step()
    with compiles(0):
        step()
    torch.set_float32_matmul_precision("high")
    with compiles() as count:
        step()
    assert count.value > 0
    torch.set_float32_matmul_precision("highest")
    with compiles(0):
        step()


def test_what_is_no_level_is_refused():
    assert backends.get_mat_mul_precision() == "default"
    with pytest.raises(
        ValueError, match=r"\[backends\] got precision 'exact', expected 'default', 'high' or 'highest'"
    ):
        backends.set_mat_mul_precision("exact")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_in_float32(dtype):
    """1 + n times 2^-12, which a half type by itself never leaves 1 for."""
    n, small = 4096, 2.0**-12
    x = torch.full((1, n + 1), small, dtype=dtype)
    x[0, 0] = 1
    ones = torch.ones(n + 1, 1, dtype=dtype)
    results = {}
    for device in ("cpu", "xla"):
        a, b = x.to(device), ones.to(device)
        results[device] = {
            "mm": a @ b,
            "bmm": a[None] @ b[None],
            "linear": torch.nn.functional.linear(a, b.T),
            "conv1d": torch.nn.functional.conv1d(a[None], b.T[None]),
            "conv weight": torch.ops.aten.convolution_backward(
                a[None], b.T[None], b[:1].T[None], None, [1], [0], [1], False, [0], 1, [False, True, False]
            )[1],
            "sum": a.sum(),
            "mean": a.mean() * (n + 1),
            "cumsum": a.cumsum(1)[0, -1],
            "var": a.var(unbiased=False),
            "norm": a.sqrt().norm(),
        }
        results[device] = {name: value.cpu().float().reshape(()) for name, value in results[device].items()}
    for name, expected in results["cpu"].items():
        exact = {"var": results["cpu"]["var"], "norm": torch.tensor(2.0).sqrt()}.get(name, torch.tensor(2.0))
        torch.testing.assert_close(results["xla"][name], exact, rtol=1e-2, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert expected.isfinite()


def test_half_types_are_rounded_between_operators() -> None:
    x = torch.randint(-4, 5, (96, 300)).bfloat16()  # whole numbers: sums are exact until they are rounded
    y = x.to("xla")
    torch.testing.assert_close(((y @ y.T) + 1).cpu(), (x @ x.T) + 1, rtol=0, atol=0)
    weight = torch.randint(-4, 5, (64, 300)).bfloat16()
    torch.testing.assert_close(
        (torch.nn.functional.linear(y, weight.to("xla")) * 3).cpu(),
        torch.nn.functional.linear(x, weight) * 3,
        rtol=0,
        atol=0,
    )
