"""Modules of torch_xla 2.9 that scripts and notebooks import, beside those of `names.json`."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import closely, on_both

import torch_xla.distributed.spmd as xs
from torch_xla import _notices
from torch_xla._core.execute import export
from torch_xla.debug.graph_saver import save_tensors_graph
from torch_xla.experimental.custom_kernel import make_kernel_from_pallas
from torch_xla.experimental.pytreeify import pytreeify
from torch_xla.experimental.splash_attention import SplashAttentionConfig, splash_attention
from torch_xla.utils.closures import AsyncClosureHandler

Q, K, V = torch.randn(3, 2, 2, 6, 4).unbind()
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


def test_pjrt_is_a_way_to_meet() -> None:
    importlib.import_module("torch_xla.experimental.pjrt_backend")
    dist.init_process_group("xla", init_method="pjrt://")
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["dynamo_mark_sharding", "dynamo_set_buffer_donor"])
def test_operators_that_need_no_import(name: str) -> None:
    _notices.forget("deprecated")
    with pytest.warns(DeprecationWarning, match="registered without it"):
        importlib.reload(importlib.import_module(f"torch_xla.experimental.{name}"))


class TestKernelFromPallas:
    @staticmethod
    def add(x: Any, y: Any, times: int = 1) -> Any:
        import jax
        from jax.experimental import pallas

        def kernel(x: Any, y: Any, out: Any) -> None:
            out[...] = x[...] + y[...] * times

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x, y)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test_is_a_function_of_tensors(self, dtype: torch.dtype) -> None:
        x, y = torch.arange(4, dtype=dtype), torch.arange(4, dtype=dtype) * 2
        add = make_kernel_from_pallas(self.add, lambda x, y: [(x.shape, x.dtype)])
        torch.testing.assert_close(add(x.to("xla"), y.to("xla")).cpu(), x + y)
        torch.testing.assert_close(add(x.to("xla"), y.to("xla"), times=3, static_argnames=("times",)).cpu(), x + 3 * y)

    def test_results_are_what_was_said(self) -> None:
        add = make_kernel_from_pallas(self.add, lambda x, y: [(x.shape, torch.int32)])
        with pytest.raises(ValueError, match=r"^\[pallas\] got results .*float32.*, expected .*int32"):
            add(torch.ones(2, device="xla"), torch.ones(2, device="xla"))


class TestSplashAttention:
    @pytest.mark.parametrize(
        ("window", "segments", "causal", "cap"),
        [(None, False, True, None), (None, True, False, None), (2, True, True, None), (1, False, False, 0.5)],
    )
    def test_against_the_formula(self, window: int | None, segments: bool, causal: bool, cap: float | None) -> None:
        scores = Q @ K.mT
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        ahead = torch.arange(6) - torch.arange(6)[:, None]
        seen = (ahead.abs() <= (6 if window is None else window)) & (ahead <= (0 if causal else 6))
        if segments:
            seen = seen & (IDS[:, None, :, None] == IDS[:, None, None, :])
        theirs = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ V
        config = SplashAttentionConfig(attentiontype_local_sliding=window is not None, slide_window_size=window)
        given = [t.to("xla").requires_grad_() for t in (Q, K, V)]
        ours = splash_attention(*given, config.to_json(), IDS.to("xla") if segments else None, causal, cap)
        torch.testing.assert_close(ours.cpu(), theirs)
        ours.sum().backward()
        assert all(t.grad is not None and t.grad.cpu().isfinite().all() for t in given)

    def test_a_window_makes_no_array_of_all_scores(self) -> None:
        config = SplashAttentionConfig(attentiontype_local_sliding=True, slide_window_size=256)
        given = [torch.empty(2, 4, 2048, 8, device="xla", requires_grad=True) for _ in range(3)]
        grads = torch.autograd.grad(splash_attention(*given, config.to_json()).sum(), given)
        text = export.lowered(grads, "graph").stage.as_text()
        assert "2x4x256x2048xf32" in text and "2x4x2048x2048xf32" not in text

    def test_its_settings_are_text(self) -> None:
        config = SplashAttentionConfig(mesh=str(xs.Mesh([0], (1, 1), ("data", "fsdp"))), slide_window_size=3)
        assert SplashAttentionConfig.from_json(config.to_json()) == config

    def test_a_window_has_a_size(self) -> None:
        with pytest.raises(ValueError, match=r"^\[splash_attention\] got no slide_window_size"):
            splash_attention(Q, K, V, SplashAttentionConfig(attentiontype_local_sliding=True).to_json())


class TestPytreeify:
    @staticmethod
    def function(wrong: bool = False) -> Any:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensors: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
                ctx.factor = factor
                return {name: tensor * factor for name, tensor in tensors.items()}

            @staticmethod
            def backward(ctx: Any, gradients: dict[str, torch.Tensor]) -> Any:
                results = {name: gradient * ctx.factor for name, gradient in gradients.items()}
                return (results,) if wrong else (results, None)

        return pytreeify(Scaled)

    def test_nests_have_gradients(self) -> None:
        x = torch.ones(2, device="xla", requires_grad=True)
        result = self.function().apply({"a": x, "b": x * 2}, 3.0)
        (result["a"] + result["b"]).sum().backward()
        assert result["b"].tolist() == [6, 6] and x.grad is not None and x.grad.tolist() == [9, 9]

    def test_gradients_have_the_structure_of_the_arguments(self) -> None:
        x = torch.ones(2, device="xla", requires_grad=True)
        with pytest.raises(RuntimeError, match=r"^\[pytreeify\] backward returned"):
            self.function(wrong=True).apply({"a": x}, 3.0)["a"].sum().backward()


def test_closures_run_in_order_and_tell_of_failures() -> None:
    ran, failed = [], threading.Event()
    handler = AsyncClosureHandler(max_queue_size=2)
    handler.run_all([lambda i=i: ran.append(i) for i in range(5)])

    def fail() -> None:
        failed.set()
        raise ValueError("x")

    handler.run(fail)
    assert failed.wait(10)
    handler._runner.drain()
    assert ran == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="an asynchronous step closure failed earlier"):
        handler.run(lambda: None)


@pytest.mark.parametrize(("form", "part"), [("text", "aten::sin"), ("dot", "digraph"), ("hlo", "HloModule")])
def test_graphs_are_saved(form: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVE_GRAPH_FMT", form)
    for _ in range(2):
        save_tensors_graph(str(tmp_path), "step", [torch.ones(3, device="xla").sin()])
    files = sorted(tmp_path.glob(f"step-{threading.get_ident()}-*.{form}"))
    assert len(files) == 2 and all(part in file.read_text() for file in files)


def test_graphs_have_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVE_GRAPH_FMT", "png")
    with pytest.raises(RuntimeError, match=r"^\[graph_saver\] got SAVE_GRAPH_FMT=png, expected text, dot or hlo"):
        save_tensors_graph(str(tmp_path), "step", [torch.ones(3, device="xla")])


@on_both(closely)
def test_decomposed_quantized_operators(device: str) -> tuple[torch.Tensor, ...]:
    importlib.import_module("torch_xla.experimental.quantized")
    operators = torch.ops.quantized_decomposed
    x, scale = torch.randn(3, 4).to(device), torch.tensor([0.1, 0.2, 0.3], device=device)
    zero = torch.tensor([1, 0, -2], device=device)
    per_tensor = operators.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8)
    per_channel = operators.quantize_per_channel(x, scale, zero, 0, -128, 127, torch.int8)
    return per_tensor, per_channel, operators.dequantize_per_channel(per_channel, scale, zero, 0, -128, 127, torch.int8)
