"""`torch.autocast("xla")`: PyTorch's own lists of what CUDA casts to what, the cache of cast weights, and training."""

from __future__ import annotations

import warnings

import pytest
import torch
from agreement import closely, on_both
from torch.testing._internal.autocast_test_lists import AutocastTestLists

import torch_xla
import torch_xla.amp

HALF = (torch.float16, torch.bfloat16)
LISTS = AutocastTestLists("cpu")
# Entries that name a kernel of NVIDIA's library, and one whose arguments are no tensors but an equation.
NO_CASE = ("cudnn_convolution", "cudnn_convolution_transpose", "einsum")


def cases(*lists):
    """(name, arguments, keyword arguments) of the operators in these lists."""
    results = []
    for name in lists:
        for index, (op, args, *more) in enumerate(getattr(LISTS, name)):
            if op not in NO_CASE:
                kwargs = more[0] if more and isinstance(more[0], dict) else {}
                results.append(pytest.param(op, args, kwargs, id=f"{op}-{index}"))
    return results


def on_xla(x):
    if isinstance(x, torch.Tensor):
        return x.to("xla")
    return type(x)(on_xla(e) for e in x) if isinstance(x, (tuple, list)) else x


def cast(x, dtype):
    if isinstance(x, torch.Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    return type(x)(cast(e, dtype) for e in x) if isinstance(x, (tuple, list)) else x


def call(name, args, kwargs):
    for place in (torch, torch._C._nn, torch._C._linalg, args[0]):
        if hasattr(place, name):
            result = getattr(place, name)(*(args[1:] if place is args[0] else args), **kwargs)
            return result[0] if isinstance(result, tuple) else result
    raise AssertionError(f"PyTorch has no {name}")


def check(name, args, kwargs, autocast_to, runs_in):
    args = on_xla(args)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(.*chain_matmul is deprecated|Using torch.cross without)")
        with torch.autocast("xla", dtype=autocast_to):
            got = call(name, args, kwargs)
        expected = call(name, cast(args, runs_in), kwargs)
    assert got.dtype == expected.dtype == runs_in
    torch.testing.assert_close(got.cpu(), expected.cpu(), equal_nan=True)


@pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name, args, kwargs", cases("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16"))
def test_runs_in_the_lower_precision(name, args, kwargs, dtype):
    check(name, args, kwargs, dtype, dtype)


@pytest.mark.parametrize("name, args, kwargs", cases("torch_fp32", "nn_fp32", "methods_fp32"))
def test_runs_in_float32(name, args, kwargs):
    check(name, args, kwargs, torch.float16, torch.float32)


@pytest.mark.parametrize("name, args, kwargs", cases("torch_need_autocast_promote"))
def test_runs_in_the_widest_type(name, args, kwargs):
    check(name, args, kwargs, torch.float16, torch.float32)


def test_einsum_and_attention():
    a, b = torch.randn(2, 3, 4, 5, device="xla"), torch.randn(2, 3, 4, 5, device="xla")
    with torch.autocast("xla"):
        assert torch.einsum("bkhd,bqhd->bqkh", a, b).dtype == torch.bfloat16
        assert torch.nn.functional.scaled_dot_product_attention(a, b, b).dtype == torch.bfloat16


@on_both(closely)
def test_convolution_called_by_its_inner_name_has_gradients(device):
    leaves = [torch.randn(shape).to(device).requires_grad_() for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,))]
    result = torch._convolution(*leaves, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True)
    return torch.autograd.grad(result.sin().sum(), leaves)


def test_binary_cross_entropy_is_refused_as_on_cuda():
    p = torch.rand(4, 4, device="xla")
    with torch.autocast("xla"), pytest.raises(RuntimeError, match="binary_cross_entropy.* are unsafe to autocast"):
        torch.nn.functional.binary_cross_entropy(p, p)


def test_leaves_alone_what_is_not_single_precision_or_not_on_xla():
    with torch.autocast("xla"):
        wide = torch.randn(3, 3, dtype=torch.float64, device="xla")
        assert (wide @ wide).dtype == torch.float64
        whole = torch.ones(3, 3, dtype=torch.int64, device="xla")
        assert whole.sum().dtype == torch.int64
        host = torch.randn(3, 3)
        assert (host @ host).dtype == torch.float32
    here = torch.randn(3, 3, device="xla")
    with torch.autocast("cpu"):
        assert (here @ here).dtype == torch.float32
    with torch.autocast("xla"), torch.autocast("xla", enabled=False):
        assert (here @ here).dtype == torch.float32


def casts_to(dtype, text):
    return sum("_to_copy" in line and dtype in line for line in text.splitlines())


@pytest.mark.parametrize("cached, expected", [(True, 1), (False, 3)])
def test_a_weight_is_cast_once_while_the_cache_is_on(cached, expected):
    weight = torch.nn.Parameter(torch.randn(4, 4, device="xla"))
    x = torch.randn(4, 4, device="xla", dtype=torch.bfloat16)
    torch_xla.sync()
    with torch.autocast("xla", cache_enabled=cached):
        y = x @ weight @ weight @ weight
        text = torch_xla._XLAC._get_xla_tensors_text([y])
    assert casts_to("bf16", text) == expected


def test_the_cache_sees_a_weight_that_changed_after_the_block():
    weight = torch.nn.Parameter(torch.ones(2, 2, device="xla"))
    for expected in (2.0, 4.0):
        with torch.autocast("xla"):
            y = torch.ones(2, 2, device="xla") @ weight
        assert y.tolist() == [[expected] * 2] * 2
        with torch.no_grad():
            weight.mul_(2)


def test_training_has_float32_gradients_and_one_graph(compiles):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    )
    twin = [parameter.detach().clone() for parameter in model.parameters()]
    data, target = torch.randn(6, 3, 8, 8), torch.randint(3, (6,))

    def train(device):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x, y = data.to(device), target.to(device)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            assert loss.dtype == torch.float32
            loss.backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            losses.append(loss.detach())
            torch_xla.sync()
        return [loss.item() for loss in losses]

    expected = train("cpu")
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), twin, strict=True):
            parameter.copy_(old)
        model[1].reset_running_stats()
    model.to("xla")
    with compiles(1):
        got = train("xla")
    assert got == pytest.approx(expected, rel=0.02)
    assert got[-1] < got[0]


def test_custom_function_casts():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="xla", cast_inputs=torch.float32)
        def forward(ctx, a, b):
            assert not torch.is_autocast_enabled("xla")
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="xla")
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    a = torch.randn(3, 3, device="xla", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("xla"):
        out = Product.apply(a, a)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert a.grad.dtype == torch.bfloat16


class TestOlderName:
    def test_casts(self):
        x = torch.randn(2, 2, device="xla")
        with torch_xla.amp.autocast(torch_xla.device()):
            assert (x @ x).dtype == torch.bfloat16
        with torch_xla.amp.autocast("xla", dtype=torch.float16):
            assert (x @ x).dtype == torch.float16
        with torch_xla.amp.autocast("xla", enabled=False):
            assert (x @ x).dtype == torch.float32

    def test_decorates(self):
        @torch_xla.amp.autocast("xla")
        def product(a):
            return a @ a

        assert product(torch.randn(2, 2, device="xla")).dtype == torch.bfloat16

    def test_refuses_another_device(self):
        with pytest.raises(ValueError, match="got device cpu, expected an xla device"):
            torch_xla.amp.autocast("cpu")

    def test_float16_on_tpu_warns_and_casts_nothing(self, monkeypatch):
        monkeypatch.setenv("PJRT_DEVICE", "TPU")
        monkeypatch.setattr("torch_xla._core.device.client._chosen", None)
        with pytest.warns(UserWarning, match="on TPU: nothing is cast, expected torch.bfloat16"):
            context = torch_xla.amp.autocast("xla", dtype=torch.float16)
        x = torch.randn(2, 2, device="xla")
        with context:
            assert (x @ x).dtype == torch.float32
