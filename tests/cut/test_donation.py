"""Donation: overwritten buffers are given to the program, buffers that anyone can still reach are not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
import torch

import torch_xla
from torch_xla import _XLAC, _bindings
from torch_xla._core.execute import barrier, pipeline
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

SIZE = 50_000  # too large for the host to compute


def computed(size: int = SIZE) -> torch.Tensor:
    """A tensor that had its value at the last barrier."""
    x = torch.linspace(0, 1, size).to("xla")
    torch_xla.sync()
    return x


def sync_counting_donations() -> int:
    """Issues a barrier; the number of buffers its graph gives away, beside graphs that nobody runs."""
    idle = [_bindings.Cut.of_device(0).graph() for _ in range(3)]
    torch.zeros(1, device="xla")
    torch_xla.sync()
    return len(idle[-1].donated)


pytestmark = pytest.mark.usefixtures("idle")


class TestDonated:
    @pytest.mark.compiled("a thread records while it compiles")
    def test_a_thread_that_records_with_a_view_before_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def first_use(*arguments: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                made[:] = made or [pool.submit(lambda: row + 1).result()]
            return compile_graph(*arguments)

        compile_graph, made = pipeline._first_use, list[torch.Tensor]()
        x = torch.arange(8.0, device="xla").reshape(2, 4) + 1
        torch_xla.sync()
        row = x[0]
        row.copy_(x[1] * 2)
        monkeypatch.setattr(pipeline, "_first_use", first_use)
        torch_xla.sync()
        assert x[0].tolist() == [10, 12, 14, 16] and made[-1].tolist() == [11, 13, 15, 17]

    def test_a_tensor_written_in_place(self) -> None:
        x = computed()
        x.mul_(1.0)
        assert sync_counting_donations() == 1
        address = _XLAC._unsafe_buffer_pointer(x)  # now in the device's own memory, not the host's
        x.add_(2.5)
        assert sync_counting_donations() == 1
        assert _XLAC._unsafe_buffer_pointer(x) == address
        assert x[:2].tolist() == pytest.approx([2.5, 2.5 + 1 / (SIZE - 1)])

    def test_a_parameter_whose_data_is_replaced(self) -> None:
        parameter = torch.nn.Parameter(computed())
        parameter.data.mul_(2.5)
        assert sync_counting_donations() == 1

    def test_with_aliases_that_see_the_new_value(self) -> None:
        x = computed()
        alias, data = x.detach(), x.data
        x.add_(2.5)
        assert sync_counting_donations() == 1
        assert alias[0].item() == data[0].item() == 2.5

    def test_a_write_through_a_view(self) -> None:
        x = computed()
        x[:3].fill_(7.5)
        assert sync_counting_donations() == 1
        assert x[:4].tolist() == pytest.approx([7.5] * 3 + [3 / (SIZE - 1)])

    def test_a_value_that_another_result_of_the_graph_needs(self) -> None:
        x = computed()
        y = x * 2.5
        x.add_(1.5)
        assert sync_counting_donations() == 1
        assert y[-1].item() == 2.5
        assert x[-1].item() == 2.5

    def test_state_made_from_nothing_is_given_away_in_its_first_step_as_in_later_ones(self) -> None:
        x = computed()
        state = torch.zeros(SIZE, device="xla")
        counts = []
        for _ in range(3):
            state.mul_(0.5).add_(x)
            counts.append(sync_counting_donations())
        assert counts == [1, 1, 1]
        assert state[-1].item() == 1.75

    def test_each_parameter_and_state_of_a_step(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        counts = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 8).to("xla")).sum().backward()
            optimizer.step()
            counts.append(sync_counting_donations())
        assert counts[1:] == [8, 8, 8]

    @pytest.mark.compiled("it is about buffers that the host computed", reads=False)
    def test_what_the_host_computed(self) -> None:
        def constant() -> torch.Tensor:
            x = torch.arange(3, device="xla") + 2
            assert x.tolist() == [2, 3, 4]
            return x

        x = constant()
        x.add_(5)
        assert sync_counting_donations() == 1
        assert x.tolist() == [7, 8, 9]
        assert constant().tolist() == [2, 3, 4]
        x.add_(5)
        assert sync_counting_donations() == 1


class TestKept:
    """What is still reachable keeps its value."""

    def check(self, x: torch.Tensor, kept: Callable[[], torch.Tensor]) -> None:
        """Writes to `x`, which must not change what `kept` gives, nor the graph: it has x's buffer as without it."""
        before = kept().cpu().clone()
        x.add_(2.5)
        assert sync_counting_donations() == 1
        torch.testing.assert_close(kept().cpu(), before)
        x.add_(2.5)
        sync_counting_donations()
        torch.testing.assert_close(kept().cpu(), before)
        assert x[0].item() == 5.0

    def test_a_clone(self) -> None:
        x = computed()
        clone = x.clone()
        torch_xla.sync()
        self.check(x, lambda: clone)

    def test_a_clone_that_is_pending(self) -> None:
        x = computed()
        clone = x.clone()
        x.add_(2.5)
        sync_counting_donations()
        assert clone[0].item() == 0.0
        assert x[0].item() == 2.5

    def test_a_copy_made_by_copy_(self) -> None:
        x = computed()
        copy = torch.empty(SIZE, device="xla")
        copy.copy_(x)
        torch_xla.sync()
        self.check(x, lambda: copy)

    def test_a_view_that_was_seen(self) -> None:
        x = computed()
        view = x[2:4]
        torch_xla.sync()
        x.add_(2.5)
        sync_counting_donations()
        torch.testing.assert_close(view.cpu(), torch.linspace(0, 1, SIZE)[2:4] + 2.5)

    def test_copies_of_a_state_dict(self) -> None:
        model = torch.nn.Linear(300, 300).to("xla")
        torch_xla.sync()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expected = {name: tensor.cpu() for name, tensor in saved.items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 300).to("xla")).sum().backward()
            optimizer.step()
            torch_xla.sync()
        for name, tensor in saved.items():
            torch.testing.assert_close(tensor.cpu(), expected[name])
        model.load_state_dict(saved)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor.cpu(), expected[name])

    def test_plain_references_of_a_state_dict_follow_the_model(self) -> None:
        model = torch.nn.Linear(300, 300).to("xla")
        torch_xla.sync()
        references = model.state_dict()
        with torch.no_grad():
            model.weight.add_(2.5)
        assert sync_counting_donations() == 1
        torch.testing.assert_close(references["weight"].cpu(), model.weight.detach().cpu())

    def test_a_value_that_a_pending_graph_needs(self) -> None:
        x = computed()
        pending = x * 2.5
        x.add_(1.5)
        barrier.evaluate([x])
        assert _bindings.buffer_of(pending) is None
        assert x[-1].item() == 2.5
        x.add_(1.5)
        barrier.evaluate([x])
        torch_xla.sync()
        assert pending[-1].item() == 2.5
        assert x[-1].item() == 4.0

    def test_a_value_that_backward_will_need(self) -> None:
        x = computed().requires_grad_()
        weight = computed()
        loss = (x * weight.clone()).sum()
        torch_xla.sync()
        weight.add_(2.5)
        sync_counting_donations()
        loss.backward()
        torch_xla.sync()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), torch.linspace(0, 1, SIZE))

    def test_a_value_of_another_device(self) -> None:
        x = computed()
        other = x.to("xla:1")
        x.add_(2.5)
        torch_xla.sync()
        assert other[0].item() == 0.0
        assert x[0].item() == 2.5

    def test_the_source_of_a_swap(self) -> None:
        x, y = computed(), computed() + 1.5
        torch_xla.sync()
        x.data, y.data = y.data, x.data
        x.add_(1.0)
        sync_counting_donations()
        assert x[0].item() == 2.5
        assert y[0].item() == 0.0

    def test_nothing_when_a_callback_may_fail(self) -> None:
        x = computed()
        buffer = _bindings.buffer_of(x)
        x.copy_(torch.special.airy_ai(x))
        torch_xla.sync()
        assert not buffer.is_deleted()

    def test_a_tensor_whose_dtype_or_shape_changes_reuses_nothing_it_should_not(self) -> None:
        x = computed()
        x.data = x.double()
        torch_xla.sync()
        assert x.dtype == torch.float64
        assert x[-1].item() == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_memory_does_not_grow(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to("xla")
    optimizer = make(model.parameters())
    data = torch.linspace(-1, 1, 80).reshape(5, 16).to("xla")
    live = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync(wait=True)
        live.append(len(jax.live_arrays()))
    assert len(set(live[2:])) == 1, live
    assert loss.isfinite()


def test_a_compiled_function_writes_over_given_buffers_only() -> None:
    function = torch.compile(lambda x: x * 3 + 1, backend="openxla")
    for given in (False, True):
        x = torch.arange(6.0).to("xla")
        assert not given or _XLAC._set_buffer_donation(x, True)
        assert function(x).tolist() == [1, 4, 7, 10, 13, 16]
        assert _XLAC._is_placecholder(x) is given
        assert ("Data Handle: Deleted" in _XLAC._get_xla_tensor_debug_info(x)) is given


def test_gifts_are_counted_and_may_be_taken_anywhere_in_a_block(counted) -> None:
    x = torch.arange(6.0).to("xla")
    with counted("XlaSetBufferDonation", 0):
        assert not _XLAC._set_buffer_donation(x + 1, True)  # it has no buffer yet
    with counted("XlaSetBufferDonation", 1), alias_with_buffer_donor_config() as before:
        assert _XLAC._set_buffer_donation(x, True)
        y = x + 1
        _XLAC._xla_sync_multi([y], [], True, False)
    assert before is False is _XLAC._xla_get_enable_alias_with_buffer_donor_config()
    assert _XLAC._is_placecholder(x) and y.tolist() == [1, 2, 3, 4, 5, 6]
