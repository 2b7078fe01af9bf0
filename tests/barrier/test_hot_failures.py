"""What goes wrong in graphs that run operator by operator is told as it is of programs, and nothing else is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import here, setting
from torch import Tensor
from torch.nn import functional as F

import torch_xla
from torch_xla import _bindings, _config
from torch_xla._core.compile import cache
from torch_xla._core.execute import barrier, hotness
from torch_xla.ops import registry

pytestmark = [pytest.mark.by_default("new graphs are not compiled"), pytest.mark.usefixtures("when_hot")]

LIBRARY = torch.library.Library("hot", "DEF")
LIBRARY.define("probe(Tensor x) -> Tensor")
LIBRARY.impl("probe", torch.empty_like, "Meta")


def ways(call: Callable[[], Any]) -> list[Any]:
    """What a call gives operator by operator, and in programs."""
    results = []
    for on in (True, False):
        hotness.clear()
        cache.clear()
        with setting(_config.XLA_HOST_COMPUTE, "new" if on else "never"):
            results.append(call())
    return results


class TestAnOperatorThatFails:
    @pytest.fixture(autouse=True)
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(ctx: Any, x: Any) -> Any:
            raise KeyError("no such thing")

        monkeypatch.setitem(registry._RULES, "hot.probe.default", broken)

    def test_in_the_middle(self, compiles: Counting) -> None:
        x = torch.arange(3000.0).to("xla")
        torch_xla.sync()
        before = x * 2
        lost = torch.ops.hot.probe(before)
        line = here(-1)
        x.add_(lost)
        later, beside = lost + 1, before + 1
        with compiles(0), pytest.raises(RuntimeError, match=r"\[lower hot.probe.default\] KeyError") as failure:
            torch_xla.sync()
        assert line in str(failure.value)
        assert beside[:2].tolist() == [1, 3] and x[:2].tolist() == [0, 1]  # as at the last barrier
        for tensor in (lost, later):
            with pytest.raises(RuntimeError, match="make it again"):
                tensor.cpu()
        torch_xla.sync()
        assert (x + 1)[0].item() == 1

    def test_says_what_a_program_says(self) -> None:
        def told() -> tuple[type, str]:
            torch.ops.hot.probe(torch.ones(500, 100).to("xla"))
            lost = torch.ops.hot.probe(torch.ones(500, 100).to("xla"))
            with pytest.raises(RuntimeError) as failure:
                torch_xla.sync()
            assert _bindings.is_lost(lost)
            return type(failure.value), str(failure.value)

        one, other = ways(told)
        assert one == other


class TestInterrupts:
    def test_between_operators(self) -> None:
        a = torch.ones(600, 600).to("xla")
        kept = a + 1
        b = a
        for _ in range(60):
            b = (b @ a) / 600
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            torch_xla.sync(wait=True)
            for _ in range(100):
                threading.Event().wait(0.1)  # it may be told only after the barrier
        assert kept[0, 0].item() == 2 and b.sum().item() == 360_000

    def test_inside_a_rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(ctx: Any, x: Any) -> Any:
            if not told:
                told.append(1)
                signal.raise_signal(signal.SIGINT)
            return x * 2

        told: list[int] = []
        monkeypatch.setitem(registry._RULES, "hot.probe.default", interrupted)
        x = torch.ones(3000).to("xla")
        y = torch.ops.hot.probe(x + 1)
        with pytest.raises(KeyboardInterrupt):
            torch_xla.sync(wait=True)
        assert y[0].item() == 4 and x[0].item() == 1


class TestMemory:
    def test_only_what_depends_on_what_does_not_fit_is_lost(self) -> None:
        x = torch.ones(1 << 21).to("xla")
        torch_xla.sync()
        base = x * 3
        before, lost, after = base + 1, (base[:, None] + x[None]).sum(1), base + 2
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 16384.00 GiB") as failure:
            torch_xla.sync(wait=True)
        assert "of aten.add.Tensor, at " + here(-3) in str(failure.value)
        assert (before[0].item(), after[0].item(), base[0].item(), x[0].item()) == (4, 5, 3, 1)
        assert _bindings.is_lost(lost)

    def test_kernels_stay_within_it_whatever_the_indices(self) -> None:
        """Kernels of gradients trust what their forward has checked, which rules and programs do not."""
        far = torch.tensor([[0, 1 << 33]]).to("xla")

        def bag() -> Tensor:
            weight = torch.ones(3, 4).to("xla").requires_grad_()
            F.embedding_bag(far, weight).sum().backward()
            assert weight.grad is not None
            return weight.grad.cpu()

        def pool() -> Tensor:
            grad, x, index = torch.ones(1, 1, 1).to("xla"), torch.ones(1, 2, 2).to("xla"), far[:, 1:, None]
            return torch.ops.aten.max_pool2d_with_indices_backward(
                grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index
            ).cpu()

        for call in (bag, pool):
            torch.testing.assert_close(*ways(call))

    def test_a_buffer_that_was_deleted(self) -> None:
        x = torch.ones(3000).to("xla")
        torch_xla.sync()
        (buffer,) = barrier.buffers([x])
        buffer.delete()
        lost = x + 1
        with pytest.raises(RuntimeError, match=r"\[run\] input 0, float32\[3000\], is gone: something outside"):
            torch_xla.sync()
        assert _bindings.is_lost(lost)

    def test_clones_of_what_is_given_away(self) -> None:
        x = torch.arange(3000.0).to("xla")
        torch_xla.sync()
        clone = x.clone()
        assert torch_xla._XLAC._set_buffer_donation(x, True)
        y = x + 1
        torch_xla.sync()
        assert clone[1].item() == 1 and y[1].item() == 2
        with pytest.raises(RuntimeError, match=r"\[donation\] got a tensor whose buffer was given"):
            x.cpu()


def rows() -> Tensor:
    return torch.arange(1.0, 13).view(3, 4).to("xla")


def on(*values: Any) -> Tensor:
    return torch.tensor(values).to("xla")


def embedding_gradient() -> Tensor:
    weight = rows().requires_grad_()
    F.embedding(on(0, 1 << 33, -9), weight).sum().backward()
    assert weight.grad is not None
    return weight.grad


REFUSED: dict[str, Callable[[], Tensor]] = {
    "gather": lambda: rows().gather(1, on([0, 9], [1, -7])),
    "index_put": lambda: rows().index_put((on(0, 9),), on(3.0), accumulate=True),
    "scatter_reduce": lambda: rows().scatter_reduce(1, on([0, -9]), on([5.0, 6.0]), "amax"),
    "embedding": lambda: F.embedding(on(0, 5, -1), rows()),
    "embedding's gradient": embedding_gradient,
    "cross_entropy": lambda: F.cross_entropy(rows(), on(0, 9, 1)),
    "one_hot": lambda: F.one_hot(on(0, 9), 4),
    "multinomial": lambda: torch.multinomial(on(-1.0, 2.0), 1),
    "bincount": lambda: torch.bincount(on(1, -2)),
    "division": lambda: on(4, -5) // on(0, 0) + on(4, -5) % on(0, 0),
    "cholesky": lambda: torch.linalg.cholesky_ex(on([-1.0, 2.0], [2.0, 1.0]))[1],
    "an inverse": lambda: torch.linalg.inv(on([1.0, 2.0], [2.0, 4.0])),
    "what is not sorted": lambda: torch.searchsorted(on(5.0, 1.0, 3.0, 0.0, 9.0, 2.0), on(2.0, 4.0)),
    "what NaN is sorted into": lambda: torch.searchsorted(on(1.0, 2.0, float("nan")), on(2.0, float("nan"))),
    "a grid": lambda: F.grid_sample(
        rows()[None, None], torch.full((1, 1, 2, 2), float("nan")).to("xla"), padding_mode="border", align_corners=True
    ),
    "a large float8": lambda: on(1e20, 500.0).to(torch.float8_e4m3fn).float(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_does_not_depend_on_whether_a_graph_is_compiled(name: str) -> None:
    def outcome() -> Any:
        torch_xla.manual_seed(1)
        try:
            result = REFUSED[name]()
            torch_xla.sync()
            return result.detach().cpu()
        except RuntimeError as error:
            return type(error), str(error).splitlines()[0]

    one, other = ways(outcome)
    if isinstance(one, tuple):
        assert one == other
    else:
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("name", ["what is not sorted", "what NaN is sorted into", "a grid", "a large float8"])
def test_and_is_the_cpus_where_it_refuses_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ways(lambda: REFUSED[name]().cpu())
    monkeypatch.setattr(Tensor, "to", lambda self, where, to=Tensor.to: self if where == "xla" else to(self, where))
    for each in result:
        torch.testing.assert_close(each, REFUSED[name](), equal_nan=True)


def test_windows_with_as_many_elements_as_there_are() -> None:
    """They overlap, and are not what was there in another shape."""
    x = torch.arange(24.0).view(4, 6)
    torch.testing.assert_close((x.to("xla") + 1).unfold(1, 3, 2).cpu(), (x + 1).unfold(1, 3, 2))


def test_places_are_counted_from_where_a_value_begins() -> None:
    def program(device: str) -> Tensor:
        x = torch.arange(250.0).to(device).as_strided((5, 5, 5), (50, 10, 2), 1)
        return x.clone().resize_(25, 5).cpu()

    torch.testing.assert_close(program("xla"), program("cpu"))


def test_a_type_that_an_out_tensor_decides() -> None:
    """Steps of integers are whole, not those of floats made whole."""
    result = torch.arange(0.1, -7.9, -4.0, dtype=torch.int64, device="xla")
    torch.testing.assert_close(result.cpu(), torch.arange(0.1, -7.9, -4.0, dtype=torch.int64))
