"""Packs: small state travels in few buffers, and nobody can tell."""

from __future__ import annotations

import copy
import gc
from unittest.mock import Mock

import jax
import pytest
import torch

import torch_xla
import torch_xla.utils.dlpack
from torch_xla import _bindings
from torch_xla._core.graph import graph
from torch_xla._core.lower import calling_convention, lowering

pytestmark = pytest.mark.usefixtures("idle")


def state(count: int, size: int = 6, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Tensors that had their values at the last barrier, the k-th counting from 100 k."""
    made = [(torch.arange(size) + 100 * k).to(dtype).to("xla") for k in range(count)]
    torch_xla.sync()
    return made


def update(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(0.5 if tensor.is_floating_point() else 2)
    torch_xla.sync()


def packs() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of what is pending on the device."""
    return _bindings.Packing(_bindings.Cut.of_device(0).graph()).packs


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor[0].item() for tensor in tensors]


class TestWhichTravelTogether:
    def test_those_that_are_updated_alike(self) -> None:
        tensors = state(259)
        for k, tensor in enumerate(tensors):
            tensor.mul_(2.5) if k % 2 else tensor.div_(2.5)
        assert [len(leaves) for leaves, _ in packs()] == [130, 129]
        assert all(len(leaves) == len(outputs) for leaves, outputs in packs())

    def test_some_hundreds_at_most(self) -> None:
        tensors = state(259)
        for tensor in tensors:
            tensor.mul_(2.5)
        assert [len(leaves) for leaves, _ in packs()] == [256, 3]

    def test_eight_at_most_of_those_updated_otherwise(self) -> None:
        tensors = state(11)
        updates = ("add_", "mul_", "div_", "sub_")
        for k, tensor in enumerate(tensors):
            getattr(tensor, updates[k % 4])(2.5)
        assert [len(leaves) for leaves, _ in packs()] == [8, 3]

    def test_by_dtype(self) -> None:
        tensors = state(3) + state(2, dtype=torch.int32) + state(2, dtype=torch.bfloat16)
        for tensor in tensors:
            tensor.mul_(3)
        assert sorted(len(leaves) for leaves, _ in packs()) == [2, 2, 3]

    @pytest.mark.parametrize("size", [0, 5000])
    def test_no_large_or_empty_ones(self, size: int) -> None:
        tensors = state(4, size)
        for tensor in tensors:
            tensor.mul_(2.5)
        assert packs() == []

    def test_those_that_have_clones(self) -> None:
        tensors = state(4)
        before = [tensor.clone() for tensor in tensors]
        for _ in range(3):
            for tensor in tensors:
                tensor.mul_(2.5)
            assert packs() == [((0, 1, 2, 3), (0, 1, 2, 3))]
            torch_xla.sync()
        assert values(before) == [0, 100, 200, 300]

    def test_no_single_one(self) -> None:
        (tensor,) = state(1)
        tensor.mul_(2.5)
        assert packs() == []

    def test_gradients_of_what_is_updated(self) -> None:
        parameters = [t.requires_grad_() for t in state(4)]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        sum((p * p).sum() for p in parameters).backward()
        optimizer.step()
        assert sorted(len(leaves) for leaves, _ in packs()) == [0, 4]
        torch_xla.sync()
        assert [p.grad[1].item() for p in parameters] == [2, 202, 402, 602]

    def test_no_other_results(self) -> None:
        tensors = state(4)
        results = [tensor * 2.5 for tensor in tensors]
        assert packs() == []
        assert values(results) == [0, 250, 500, 750]


class TestPlaces:
    """Where a leaf is in its pack is a value: equal layers have equal kernels."""

    LAYER = ((4, 4), (4,), (4,), (4,), (2, 4))

    @pytest.mark.parametrize(
        ("shapes", "expected"),
        [
            ([(3,)] * 20, 4),
            (LAYER * 6, 5),
            (((7,), *LAYER * 6, (9,)), 5),
            ([(k,) for k in range(20)], 8),
            ([(3,)] * 5, 8),
            ([], 8),
        ],
    )
    def test_a_layer_ends_where_the_shapes_begin_again(self, shapes, expected: int) -> None:
        assert calling_convention._layer(shapes) == expected

    def test_one_place_per_layer(self) -> None:
        tensors = [torch.full(shape, 0.5 * k).to("xla") for k, shape in enumerate(self.LAYER * 6)]
        others = [tensor.cpu() for tensor in tensors]
        torch_xla.sync()
        for group in (tensors, others):
            for tensor in group:
                tensor.copy_(tensor.cumsum(0))
        text = lowering.lower(graph.describe(_bindings.Cut.of_device(0).graph())).stage.as_text()
        places = [line for line in text.splitlines() if "optimization_barrier" in line and ": tensor<i32>" in line]
        assert len(places) == 6
        torch_xla.sync()
        for got, expected in zip(tensors, others, strict=True):
            torch.testing.assert_close(got.cpu(), expected)


class TestNewValues:
    """Gradients travel in packs too."""

    @pytest.fixture
    def parameters(self) -> list[torch.Tensor]:
        parameters = [t.requires_grad_() for t in state(258)]
        self.train(parameters)
        return parameters

    def train(self, parameters: list[torch.Tensor]) -> None:
        sum((p * p).sum() for p in parameters).backward()
        torch.optim.SGD(parameters, lr=0.25).step()
        torch_xla.sync()

    def test_a_pack_dies_with_the_last_of_them(self, parameters: list[torch.Tensor]) -> None:
        def buffers() -> int:
            gc.collect()
            return len(jax.live_arrays())

        with_gradients = buffers()
        for p in parameters[1:]:
            p.grad = None
        assert buffers() == with_gradients - 1
        parameters[0].grad = None
        assert buffers() == with_gradients - 2

    def test_one_is_read_and_the_others_later(self, parameters: list[torch.Tensor]) -> None:
        assert parameters[9].grad[1].item() == 2 * 901
        assert [p.grad[1].item() for p in parameters] == [2 * (100 * k + 1) for k in range(258)]

    def test_one_outlives_many_steps(self, parameters: list[torch.Tensor]) -> None:
        kept = parameters[3].grad
        for _ in range(3):
            for p in parameters:
                p.grad = None
            self.train(parameters)
        assert kept[1].item() == 2 * 301

    @pytest.mark.costs("programs of some hundred operators")
    def test_they_are_added_to(self, parameters: list[torch.Tensor]) -> None:
        self.train(parameters)  # halved by the step before
        assert [p.grad[0].item() for p in parameters] == [300 * k for k in range(258)]

    def test_their_views_and_copies(self, parameters: list[torch.Tensor]) -> None:
        views = [p.grad[2:] for p in parameters]
        copied = copy.deepcopy(parameters[5].grad)
        parameters[5].grad.zero_()
        torch_xla.sync()
        assert [v[0].item() for v in views] == [0 if k == 5 else 2 * (100 * k + 2) for k in range(258)]
        assert copied[0].item() == 1000


class TestNobodyCanTell:
    def test_steps_share_one_program(self, compiles) -> None:
        tensors = state(10)
        with compiles(1):
            for _ in range(5):
                update(tensors)
        assert values(tensors) == [100 * k + 2.5 for k in range(10)]

    def test_steps_keep_their_few_buffers(self) -> None:
        tensors = state(16)
        update(tensors)
        torch_xla.sync(wait=True)  # until a program is waited for, the host has its token
        gc.collect()
        before = len(jax.live_arrays())
        for _ in range(3):
            update(tensors)
        torch_xla.sync(wait=True)
        gc.collect()
        assert len(jax.live_arrays()) == before
        assert all(_bindings.location_of(t)[1] >= 0 for t in tensors)

    def test_reading_one_moves_the_pack_only(self, counted) -> None:
        tensors = state(8)
        update(tensors)
        with counted("UncachedCompile", 0):
            assert tensors[3].tolist() == [300.5 + i for i in range(6)]

    def test_a_member_in_another_program(self) -> None:
        tensors = state(8, 200)
        update(tensors)
        products = [(tensors[5].view(10, 20) @ tensors[2].view(20, 10)).cpu() for _ in range(2)]
        expected = (torch.arange(200) + 500.5).view(10, 20) @ (torch.arange(200) + 200.5).view(20, 10)
        for product in products:
            torch.testing.assert_close(product, expected)
        update(tensors)
        assert values(tensors) == [100 * k + 1 for k in range(8)]

    def test_some_of_them_replaced(self, compiles) -> None:
        tensors = state(8, 11)
        with compiles(1):
            update(tensors)
            with torch.no_grad():
                for tensor in tensors[::2]:
                    tensor.copy_(torch.full((11,), 7.0))
            update(tensors)
            update(tensors)
        assert values(tensors) == [8, 101.5, 8, 301.5, 8, 501.5, 8, 701.5]

    def test_some_of_them_dropped(self) -> None:
        tensors = state(8)
        update(tensors)
        del tensors[::3]
        update(tensors)
        assert values(tensors) == [101, 201, 401, 501, 701]

    def test_exchanged(self) -> None:
        a, b = state(2)
        update([a, b])
        a.data, b.data = b.data.clone(), a.data.clone()
        update([a, b])
        assert values([a, b]) == [101, 1]

    def test_kept_old_values(self) -> None:
        tensors = state(4)
        update(tensors)
        kept = [tensor.clone() for tensor in tensors]
        update(tensors)
        assert values(kept) == [0.5, 100.5, 200.5, 300.5]
        assert values(tensors) == [1, 101, 201, 301]

    def test_one_gradient_outlives_the_others(self) -> None:
        parameters = [t.requires_grad_() for t in state(4)]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            sum((p * p).sum() for p in parameters).backward()
            optimizer.step()
            kept = parameters[2].grad
            torch_xla.sync()
        assert kept[0].item() == 0  # 200 -> 0 in the first step
        assert (kept * 3)[1].item() == 0

    def test_copies_and_files(self, tmp_path) -> None:
        tensors = state(4)
        update(tensors)
        torch.save(copy.deepcopy(tensors), tmp_path / "state.pt")
        assert values(torch.load(tmp_path / "state.pt")) == [0.5, 100.5, 200.5, 300.5]
        exchanged = torch.from_dlpack(torch_xla.utils.dlpack.to_dlpack(tensors[1]))
        assert exchanged.tolist() == [100.5 + i for i in range(6)]

    def test_a_failed_step_gives_the_values_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch_xla._core.compile import compiler

        tensors = state(4)
        update(tensors)
        for tensor in tensors:
            tensor.div_(3.0)

        with monkeypatch.context() as patch:
            patch.setattr(compiler, "compile_lowered", Mock(side_effect=RuntimeError("out of luck")))
            with pytest.raises(RuntimeError, match="out of luck"):
                torch_xla.sync()
        update(tensors)
        assert values(tensors) == [1, 101, 201, 301]

    def test_a_program_with_a_host_callback(self) -> None:
        from torch.library import custom_op

        @custom_op("packing_test::halve", mutates_args=())
        def halve(x: torch.Tensor) -> torch.Tensor:
            return x / 2

        halve.register_fake(torch.empty_like)
        tensors = state(4)
        for _ in range(2):
            for tensor in tensors:
                tensor.copy_(halve(tensor) + 1)
            torch_xla.sync()
        assert values(tensors) == [1.5, 26.5, 51.5, 76.5]

    def test_described_with_the_graph(self) -> None:
        tensors = state(2)
        for tensor in tensors:
            tensor.mul_(2.5)
        (pack,) = graph.describe(_bindings.Cut.of_device(0).graph()).packs
        assert pack == ((0, 1), (0, 1))
