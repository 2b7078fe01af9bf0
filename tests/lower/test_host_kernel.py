"""PyTorch's CPU kernels inside a program: where they are used, that they agree, and where they must not be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from probes import cut_of, python
from torch import Tensor

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla._core.compile import cache
from torch_xla._core.lower import lowering
from torch_xla.ops import host_kernel

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.skipif(xr.device_type() != "CPU", reason="programs of other devices have no such kernels"),
    pytest.mark.skipif(not host_kernel.register(), reason="built without jaxlib's headers, or with another version's"),
]

TARGET = "torch_xla.host_kernel"


def image(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


ROWS, IMAGE, WEIGHT = image(64, 512), image(2, 4, 80, 80), image(6, 4, 3, 3)
HEADS = image(2, 4, 64, 32)
GRID = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3) * 0.9, [2, 4, 80, 80], align_corners=False)

# By overload, a call and its arguments, large enough for the kernel.
CALLS: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "aten._fft_c2c.default": (lambda x: torch.fft.fft2(x, norm="ortho"), (torch.complex(ROWS, -ROWS),)),
    "aten._fft_c2r.default": (lambda x: torch.fft.irfft(x, n=1000), (torch.complex(ROWS, -ROWS),)),
    "aten._fft_r2c.default": (torch.fft.rfft, (ROWS,)),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (F.scaled_dot_product_attention, (HEADS,) * 3),
    "aten.argmax.default": (lambda x: x.argmax(1), (ROWS,)),
    "aten.argmin.default": (lambda x: x.argmin(0), (ROWS,)),
    "aten.bmm.default": (torch.bmm, (image(4, 64, 64), image(4, 64, 128))),
    "aten.convolution.default": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (IMAGE, WEIGHT)),
    "aten.cumprod.default": (lambda x: x.cumprod(0), (ROWS,)),
    "aten.cumsum.default": (lambda x: x.cumsum(1), (ROWS,)),
    "aten.grid_sampler_2d.default": (lambda x, g: F.grid_sample(x, g, align_corners=True), (IMAGE, GRID)),
    "aten.kthvalue.default": (lambda x: x.kthvalue(7, 1), (ROWS,)),
    "aten.linear.default": (F.linear, (ROWS.bfloat16(), ROWS.bfloat16(), image(64).bfloat16())),
    "aten.max.dim": (lambda x: x.max(1), (ROWS,)),
    "aten.median.default": (torch.median, (ROWS,)),
    "aten.median.dim": (lambda x: x.median(1, keepdim=True), (ROWS,)),
    "aten.min.dim": (lambda x: x.min(0), (ROWS,)),
    "aten.masked_scatter.default": (torch.masked_scatter, (ROWS, ROWS > 0, ROWS.flatten()[1:])),
    "aten.mm.default": (lambda x: x @ x.T, (ROWS.bfloat16(),)),
    "aten.mode.default": (lambda x: x.mode(1), ((ROWS * 9).long(),)),
    "aten.native_layer_norm.default": (lambda x, w: F.layer_norm(x, (32,), w, eps=0.1), (image(16, 32), image(32))),
    "aten.sort.default": (torch.ops.aten.sort.default, (ROWS,)),
    "aten.sort.stable": (lambda x: x.sort(dim=0, stable=True, descending=True), ((ROWS * 9).long(),)),
    "aten.upsample_bicubic2d.default": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), (IMAGE,)),
    "aten.upsample_bilinear2d.default": (lambda x: F.interpolate(x, (90, 90), mode="bilinear"), (IMAGE,)),
}
# Likewise, for those that are the backward of a call.
BACKWARD: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (F.scaled_dot_product_attention, (HEADS,) * 3),
    "aten.convolution_backward.default": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGE, WEIGHT, image(6))),
    "aten.grid_sampler_2d_backward.default": (lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE, GRID)),
    "aten.max_pool2d_with_indices_backward.default": (lambda x: F.max_pool2d(x, 2, 1), (IMAGE,)),
    "aten.max_pool3d_with_indices_backward.default": (lambda x: F.max_pool3d(x[None], 2, 1), (IMAGE,)),
    "aten.native_layer_norm_backward.default": (
        lambda x, w, b: F.layer_norm(x, (512,), w, b),
        (ROWS, ROWS[0], ROWS[1]),
    ),
    "aten.tensordot.default": (lambda x, w, b: F.linear(x.view(2, 32, 512), w, b), (ROWS, image(64, 512), image(64))),
    "aten.upsample_bicubic2d_backward.default": (lambda x: F.interpolate(x, (90, 90), mode="bicubic"), (IMAGE,)),
    "aten.upsample_bilinear2d_backward.default": (lambda x: F.interpolate(x, (90, 90), mode="bilinear"), (IMAGE,)),
}


def gradients(call: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def both(*arguments: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in arguments]
        result = call(*leaves)
        return (result.detach(), *torch.autograd.grad(result, leaves, torch.ones_like(result)))

    return both


def results(call: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: Tensor) -> list[Tensor]:
    result = call(*arguments)
    return [result] if isinstance(result, Tensor) else list(result)


def placed(*tensors: Tensor) -> bool:
    """Whether the program that computes pending tensors calls a kernel."""
    return TARGET in lowering.lower(cut_of(*tensors), to_run=True).stage.as_text()


def several_threads(tensor: Tensor) -> bool:
    """Whether the kernel in the program that computes a pending tensor is divided among PyTorch's threads."""
    text = lowering.lower(cut_of(tensor), to_run=True).stage.as_text()
    return "_parallel = true" in text


def agree(call: Callable[..., Tensor | tuple[Tensor, ...]], arguments: tuple[Tensor, ...]) -> None:
    want = results(call, *arguments)
    got = results(call, *(x.to("xla") for x in arguments))
    slow_half = arguments[0].dtype == torch.bfloat16 and "bfloat16" not in host_kernel._fast_halves()
    assert placed(*got) != slow_half
    if slow_half:  # XLA's values then, which the rule's own tests compare
        return
    torch_xla.sync()
    for have, expected in zip(got, want, strict=True):
        assert have.dtype == expected.dtype
        torch.testing.assert_close(have.cpu(), expected, atol=1e-4, rtol=1e-4)


class TestEachOperator:
    def test_all_are_here(self) -> None:
        assert {*CALLS, *BACKWARD} == set(host_kernel.OPERATORS)

    @pytest.mark.parametrize("name", CALLS)
    def test_call(self, name: str) -> None:
        agree(*CALLS[name])

    @pytest.mark.parametrize("name", BACKWARD)
    def test_backward(self, name: str) -> None:
        call, arguments = BACKWARD[name]
        agree(gradients(call), arguments)


class TestLayerNorm:
    @pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
    def test_half_types(self, weights: torch.dtype) -> None:
        arguments = ROWS.bfloat16(), ROWS[0].to(weights), ROWS[1].to(weights)
        call = gradients(lambda x, w, b: F.layer_norm(x, (512,), w, b))
        got = call(*(x.to("xla") for x in arguments))
        assert placed(*got)
        for have, given, want in zip(got[1:], arguments, call(*(x.float() for x in arguments))[1:], strict=True):
            assert have.dtype == given.dtype
            torch.testing.assert_close(have.float().cpu(), want, atol=0.1, rtol=0.02)

    def test_large_ones_stay_with_xla(self) -> None:
        assert not placed(F.layer_norm(ROWS.to("xla"), (512,)))

    def test_of_nothing(self) -> None:
        call = gradients(lambda x, w: F.layer_norm(x, (4,), w))
        agreed = zip(call(*(x.to("xla") for x in (image(0, 4), image(4)))), call(image(0, 4), image(4)), strict=True)
        assert all(torch.equal(have.cpu(), want) for have, want in agreed)


class TestConvolutions:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_types(self, dtype: torch.dtype) -> None:
        x, w = IMAGE.to(dtype).to("xla"), WEIGHT.to(dtype).to("xla").requires_grad_()
        out = F.conv2d(x, w, padding="same")
        (grad,) = torch.autograd.grad(out.sum(), w)
        assert placed(out, grad)
        assert out.dtype == grad.dtype == dtype
        want = F.conv2d(IMAGE.to(dtype).float(), WEIGHT.to(dtype).float(), padding="same")
        torch.testing.assert_close(out.float().cpu(), want, atol=0.1, rtol=0.02)

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=3, output_padding=2, padding=1),
            lambda x, w: F.conv2d(x, w[:4, :1], groups=4, dilation=2),
            lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0]),
            lambda x, w: F.conv3d(x[:, :, None], w[:, :, None], stride=(1, 2, 3)),
            lambda x, w: F.conv2d(x[0], w),
            lambda x, w: F.conv2d(x.permute(0, 1, 3, 2), w.flip(2)),
        ],
        ids=["transposed", "depthwise", "1d", "3d", "unbatched", "views"],
    )
    def test_forms(self, call: Callable[..., Tensor]) -> None:
        agree(gradients(call), (IMAGE, WEIGHT))

    def test_only_the_gradients_that_are_wanted(self) -> None:
        w = WEIGHT.clone().to("xla").requires_grad_()
        (grad,) = torch.autograd.grad(F.conv2d(IMAGE.to("xla"), w).square().sum(), w)
        text = lowering.lower(cut_of(grad), to_run=True).stage.as_text()
        backward = next(line for line in text.splitlines() if TARGET in line and "convolution_backward" in line)
        assert backward.rsplit("->", 1)[1].count("tensor<") == 1

    def test_large_ones_take_several_threads(self) -> None:
        assert not several_threads(F.conv2d(IMAGE[:, :, :9, :9].to("xla"), WEIGHT.to("xla")))
        assert several_threads(F.conv2d(IMAGE.repeat(12, 1, 1, 1).to("xla"), WEIGHT.to("xla")))

    def test_several_at_once(self) -> None:
        x, weights = IMAGE.repeat(12, 1, 1, 1), [WEIGHT * i for i in range(1, 9)]
        got = [F.conv2d(x.to("xla"), w.to("xla")) for w in weights]
        torch_xla.sync()
        for w, have in zip(weights, got, strict=True):
            torch.testing.assert_close(have.cpu(), F.conv2d(x, w), atol=1e-4, rtol=1e-4)


class TestGradientsOfWeights:
    @staticmethod
    def gradient(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        w = torch.zeros(512, 1024, device="xla", dtype=dtype, requires_grad=True)
        out = F.linear(torch.zeros(2, rows, 1024, device="xla", dtype=dtype), w)
        return torch.autograd.grad(out, w, torch.zeros_like(out))[0]

    def test_stay_beside_other_work_unless_very_large(self) -> None:
        assert placed(self.gradient(64)) and not several_threads(self.gradient(64))
        assert several_threads(self.gradient(512))

    def test_of_half_types_sum_over_one_dimension(self) -> None:
        grad = self.gradient(64, torch.bfloat16)
        text = lowering.lower(cut_of(grad), to_run=True).stage.as_text()
        assert not placed(grad) and "contracting_dims = [0] x [0]" in text  # over several, XLA:CPU would transpose


@pytest.mark.parametrize("call", [torch.cos, torch.sin])
def test_functions_of_the_c_library_are_computed_once(call: Callable[[Tensor], Tensor]) -> None:
    angles, x = image(16, 8), image(4, 16, 8)

    def rotated(angles: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return x * call(angles), (x + 1) * call(angles)[:, :4].repeat(1, 2)

    got = rotated(angles.to("xla"), x.to("xla"))
    torch_xla.sync()
    (program,) = cache._executables.values()
    assert len(re.findall(r" (?:co)?sine\(", program.loaded.hlo_modules()[0].to_string())) == 1
    for have, want in zip(got, rotated(angles, x), strict=True):
        torch.testing.assert_close(have.cpu(), want)


@pytest.mark.parametrize(
    "neighbours",
    [
        lambda u: [torch.roll(u, shift, dim) for shift in (1, -1) for dim in (0, 1)],
        lambda u: [F.pad(u, (1, 1))[:, :-2], F.pad(u, (1, 1))[:, 2:], F.pad(u, (0, 0, 1, 1))[2:]],
        lambda u: [F.pad(u[None], (1, 1), mode="replicate")[0, :, shift : shift + 16] for shift in (0, 2)],
    ],
)
def test_chains_of_stencils_compute_each_step_once(neighbours: Callable[[Tensor], list[Tensor]]) -> None:
    def steps(count: int) -> float:
        u = image(16, 16).to("xla")
        for _ in range(count):
            u = u + (sum(neighbours(u)) - 4 * u) * 0.1
        torch_xla.sync()
        return float(list(cache._executables.values())[-1].keep.cost_analysis()["flops"])

    assert steps(6) <= 3.5 * steps(2)


def test_results_are_written_where_xla_wants_them() -> None:
    text = lowering.lower(cut_of(*ROWS.to("xla").max(1)), to_run=True).stage.as_text()
    assert '_overload = "dim_max"' in text
    assert host_kernel._writing(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default) is None


def test_permutations() -> None:
    drawn = torch.randperm(40_000, device="xla")
    assert placed(drawn)
    assert torch.equal(drawn.cpu().sort()[0], torch.arange(40_000))
    assert not torch.equal(drawn.cpu(), torch.randperm(40_000, device="xla").cpu())


def test_products_of_integers() -> None:
    agree(torch.mm, ((ROWS * 100).long(), (ROWS.T * 100).long()))


class TestAttention:
    @pytest.mark.parametrize("kind", ["truth", "numbers", "row without a key", "causal"])
    def test_masks(self, kind: str) -> None:
        masks = {
            "truth": torch.rand(64, 64) > 0.3,
            "numbers": image(2, 1, 64, 64),
            "row without a key": (torch.arange(64) > 2)[:, None].expand(64, 64),
        }
        mask = masks.get(kind)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = None if mask is None else mask.to(q.device)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=own, is_causal=kind == "causal", scale=0.3)

        agree(gradients(attend), (HEADS, HEADS + 1, HEADS * 2))

    def test_dropout_is_left_to_the_rule(self) -> None:
        q = HEADS.to("xla")
        assert not placed(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))

    def test_narrow_heads_take_several_threads_for_their_exponentials(self) -> None:
        q = torch.zeros(2, 8, 256, 4, device="xla")
        assert several_threads(F.scaled_dot_product_attention(q, q, q))
        assert not several_threads(F.scaled_dot_product_attention(q[:, :1], q[:, :1], q[:, :1]))

    @pytest.mark.parametrize("heads", [1, 2])
    @pytest.mark.parametrize(
        "options", [{"is_causal": True}, {"attn_mask": torch.ones(64, 64, dtype=torch.bool).tril()}]
    )
    def test_grouped_heads(self, heads: int, options: dict[str, Any]) -> None:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = {name: value.to(q.device) if name == "attn_mask" else value for name, value in options.items()}
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)

        arguments = (HEADS, HEADS[:, :heads], HEADS[:, 2 : 2 + heads] * 2)
        got = gradients(call)(*(x.to("xla") for x in arguments))
        text = lowering.lower(cut_of(*got), to_run=True).stage.as_text()
        assert text.count(f"@{TARGET}(") == 2  # one forward, one backward
        agree(gradients(call), arguments)


class TestElsewhere:
    """A program that is exported, or runs on another kind of device, has none of this."""

    def test_exports(self) -> None:
        out = F.conv2d(IMAGE.to("xla"), WEIGHT.to("xla"))
        assert TARGET not in xm.get_stablehlo([out])
        assert "stablehlo.convolution" in xm.get_stablehlo([out])

    def test_small_and_other_dtypes(self) -> None:
        small, double = ROWS[:4].to("xla"), IMAGE.double().to("xla")
        assert not placed(small.sort()[0], small.cumsum(0), small.argmax(1))
        assert not placed(F.conv2d(double, WEIGHT.double().to("xla")))
        assert not placed(F.conv2d(IMAGE[:0].to("xla"), WEIGHT.to("xla")))

    def test_built_without_headers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_kernel, "register", lambda: False)
        out = F.conv2d(IMAGE.to("xla"), WEIGHT.to("xla"))
        assert not placed(out)
        torch.testing.assert_close(out.cpu(), F.conv2d(IMAGE, WEIGHT), atol=1e-4, rtol=1e-4)

    def test_built_for_another_jaxlib(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: object, **others: object) -> None:
            raise RuntimeError("version 99 of the interface")

        monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
        with pytest.warns(UserWarning, match=r"^\[host kernel\] jaxlib .*version 99.*install torch_xla again"):
            assert not host_kernel.register.__wrapped__()


PROGRAM = """
import sys, torch, torch_xla, torch_xla.runtime as xr, torch_xla.debug.metrics as met
xr.initialize_cache(sys.argv[1])
x = torch.arange(20000.0).reshape(2, 1, 100, 100).to("xla").requires_grad_()
out = torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3, device="xla"))
out.sum().backward()
torch_xla.sync()
print(out[1, 0, 5, 5].item(), x.grad.sum().item(), met.counter_value("PersistentCacheHit"))
"""


class TestProcess:
    @pytest.mark.costs("a process that imports all anew")
    def test_a_program_from_disk_calls_it(self, tmp_path: Path) -> None:
        ways = (True, False)  # the kernels are at other addresses where they are loaded anew
        runs = (python("-c", PROGRAM, str(tmp_path), devices=1, imported=way) for way in ways)
        first, second = (run.stdout.split() for run in runs)
        assert first[:2] == second[:2] == ["95454.0", "172872.0"]
        assert first[2] == "None" and int(second[2]) >= 1

    @pytest.mark.parametrize("work", [1, 1 << 40])
    def test_a_kernel_that_fails_is_an_error(self, work: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(host_kernel.OPERATORS, "aten.gather.default", lambda *rest, **others: work)
        kept = torch.ones(4).to("xla") * 2
        wrong = torch.gather(ROWS.to("xla"), 1, torch.full((64, 1), 600).to("xla"))
        with pytest.raises(RuntimeError, match="index 600 is out of bounds"):
            wrong.cpu()
        assert (kept + 1).tolist() == [3.0] * 4
