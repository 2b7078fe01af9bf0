"""`torch_xla.Graph` and values: what is remembered of them is unknown while a graph is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_captured_graph import captured, nothing_is_captured  # noqa: F401
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _bindings
from torch_xla._core.compile import compiler

# Values x, a mask, positions and a number, as they are in the warm-up and in the capture, and in the replays.
FIRST = (torch.arange(6.0), torch.arange(6) > 3, torch.tensor([0, 1, 1, 2, 0, 3]), torch.tensor(2))
LATER = (
    (torch.tensor([5.0, 0, 2, 2, 7, 1]), torch.arange(6) > 0, torch.tensor([5, 0, 4, 2, 1, 0]), torch.tensor(4)),
    (torch.ones(6), torch.zeros(6, dtype=torch.bool), torch.tensor([0, 0, 0, 0, 0, 0]), torch.tensor(0)),
)
Reader = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _class_loss(x: Tensor, m: Tensor, i: Tensor, n: Tensor) -> Tensor:
    logits = torch.stack([x, x * 0.5, 1 - x], 1).requires_grad_()
    loss = F.cross_entropy(logits[m], i[m].clamp(0, 2))
    return torch.autograd.grad(loss, logits)[0]


# What needs a value to know what it makes, or what comes next.
READS: dict[str, Reader] = {
    "x[m]": lambda x, m, i, n: x[m],
    "x[m] of rows": lambda x, m, i, n: x.reshape(6, 1).expand(6, 2)[m, :],
    "x[m, i]": lambda x, m, i, n: x.reshape(6, 1)[m, 0],
    "a loss of x[m]": _class_loss,
    "masked_select": lambda x, m, i, n: x.masked_select(m),
    "nonzero": lambda x, m, i, n: torch.nonzero(m),
    "nonzero of numbers": lambda x, m, i, n: torch.nonzero(x),
    "argwhere": lambda x, m, i, n: torch.argwhere(m),
    "where": lambda x, m, i, n: torch.where(m),
    "unique": lambda x, m, i, n: torch.unique(i),
    "unique_consecutive": lambda x, m, i, n: torch.unique_consecutive(i),
    "repeat_interleave": lambda x, m, i, n: x.repeat_interleave(i),
    "bincount": lambda x, m, i, n: torch.bincount(i),
    "one_hot": lambda x, m, i, n: F.one_hot(i),
    "item": lambda x, m, i, n: x * n.item(),
    "tolist": lambda x, m, i, n: x * i.tolist()[-1],
    "numpy": lambda x, m, i, n: x * float(x.cpu().numpy()[0]),
    "bool": lambda x, m, i, n: x if m.any() else -x,
    "all": lambda x, m, i, n: x if bool((x > 1).all()) else -x,
    "equal": lambda x, m, i, n: x if torch.equal(x, x * 1) and torch.equal(i, i.flip(0)) else -x,
    "allclose": lambda x, m, i, n: x if torch.allclose(x, torch.ones_like(x)) else -x,
    "sizes": lambda x, m, i, n: x.split([int(n), 6 - int(n)]),
    "a slice": lambda x, m, i, n: x[:n],
    "a position": lambda x, m, i, n: x.select(0, int(n)),
    "a range": lambda x, m, i, n: torch.arange(n, device=x.device),
    "a shape": lambda x, m, i, n: torch.zeros(int(n), device=x.device),
    "combinations of x[m]": lambda x, m, i, n: torch.combinations(x[m]),
    "checked gradients": lambda x, m, i, n: nn.utils.clip_grad_norm_(_with_grad(x), 1.0, error_if_nonfinite=True),
    "an inverse": lambda x, m, i, n: torch.linalg.inv(torch.diag(x + 1)),
    "packed": lambda x, m, i, n: (
        nn.utils.rnn.pack_padded_sequence(
            x.reshape(2, 3, 1), i[1:3].cpu() + 1, batch_first=True, enforce_sorted=False
        ).data
    ),
}
# What works with all values there may be.
COMPUTES: dict[str, Reader] = {
    "a sum of m": lambda x, m, i, n: (x * m).sum(),
    "count_nonzero": lambda x, m, i, n: torch.count_nonzero(x),
    "where": lambda x, m, i, n: torch.where(m, x, -x),
    "masked_fill": lambda x, m, i, n: x.masked_fill(m, 9),
    "masked_scatter": lambda x, m, i, n: x.masked_scatter(m, x.flip(0)),
    "x[m] = a number": lambda x, m, i, n: _set(x, (m,), 9),
    "x[m] = a tensor": lambda x, m, i, n: x.index_put((m,), n.float()),
    "x[i]": lambda x, m, i, n: x[i],
    "x[i] += x": lambda x, m, i, n: x.index_put((i,), x, accumulate=True),
    "gather": lambda x, m, i, n: x.gather(0, i),
    "scatter": lambda x, m, i, n: x.scatter(0, i, 3.0),
    "nonzero_static": lambda x, m, i, n: torch.nonzero_static(m, size=6),
    "sort": lambda x, m, i, n: x.sort(),
    "cumsum": lambda x, m, i, n: m.cumsum(0),
    "bounds": lambda x, m, i, n: x.clamp(n, n + 1),
    "one_hot": lambda x, m, i, n: F.one_hot(i, 6),
    "repeat_interleave": lambda x, m, i, n: x.repeat_interleave(2),
    "searchsorted": lambda x, m, i, n: torch.searchsorted(torch.arange(6.0, device=x.device), x),
    "embedding": lambda x, m, i, n: F.embedding(i, x.reshape(6, 1)),
    "an inverse": lambda x, m, i, n: torch.linalg.inv_ex(torch.diag(x + 1))[0],
}


def _with_grad(x: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(x.clone())
    parameter.grad = x * 1
    return parameter


def _set(x: Tensor, where: tuple[Tensor, ...], value: Any) -> Tensor:
    result = x.clone()
    result[where] = value
    return result


def warmed_up(function: Reader) -> list[Tensor]:
    """Static tensors, of which all is known that the function asks for."""
    static = [t.to("xla") for t in FIRST]
    for _ in range(2):
        for result in pytree.tree_leaves(function(*static)):
            result.cpu()
        torch_xla.sync()
    return static


class TestValues:
    @pytest.mark.parametrize("name", READS)
    def test_a_read_is_refused(self, name: str) -> None:
        static = warmed_up(READS[name])
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a read while a graph is captured"):
            captured(READS[name], *static)
        expected = READS[name](*FIRST)
        torch.testing.assert_close(pytree.tree_map(Tensor.cpu, READS[name](*static)), expected)  # known again

    @pytest.mark.parametrize("name", COMPUTES)
    def test_others_follow_their_values(self, name: str) -> None:
        static = warmed_up(COMPUTES[name])
        graph, made = captured(COMPUTES[name], *static)
        for values in LATER:
            for tensor, value in zip(static, values, strict=True):
                tensor.copy_(value)
            graph.replay()
            torch.testing.assert_close(pytree.tree_map(Tensor.cpu, made), COMPUTES[name](*values))

    def test_a_mask_of_the_host_is_a_constant(self) -> None:
        x, mask = FIRST[0].to("xla"), FIRST[1].clone()
        graph, y = captured(lambda: x[mask])
        mask.fill_(True)
        x.copy_(torch.arange(6.0) + 1)
        graph.replay()
        assert y.tolist() == [5, 6]


class TestAKeptGraph:
    """`keep_graph=True`: what is recorded waits, whatever runs meanwhile."""

    @staticmethod
    def step(x: Tensor, start: int, factor: float) -> tuple[Tensor, Tensor]:
        part = x[start : start + 2] * factor
        x.add_(torch.rand(4, device="xla"))
        return part + x.sum(), torch.rand(2, device="xla")

    @pytest.mark.compiled("a graph that differs in constants is compared with compiled ones")
    def test_other_barriers_come_between(self) -> None:
        def run(replayed: bool) -> list[list[float]]:
            torch.manual_seed(2)
            x, other = torch.arange(4.0).to("xla"), torch.ones(3).to("xla")
            self.step(x, 0, 2.0)
            torch_xla.sync()
            graph = torch_xla.Graph(keep_graph=True)
            if replayed:
                with graph:
                    made = self.step(x, 2, 3.0)
            self.step(x, 1, 4.0)  # the start of the slice is a number of the program from here on
            torch_xla.sync()
            other.add_(1)
            assert other.tolist() == [2] * 3
            x.mul_(0.5)
            results = []
            for _ in range(2):
                if replayed:
                    graph.replay()
                else:
                    made = self.step(x, 2, 3.0)
                results += [t.tolist() for t in (*made, x)]
            return results

        assert run(True) == run(False)

    def test_a_backward_pass_that_is_recomputed_later(self) -> None:
        """What a captured backward pass recorded is no part of another one."""
        layer = nn.Linear(3, 3).to("xla")
        x = torch.ones(2, 3).to("xla").requires_grad_()

        def step() -> Tensor:
            (gradient,) = torch.autograd.grad(
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sin().sum(), x
            )
            return gradient

        expected = step().cpu()
        graph = torch_xla.Graph(keep_graph=True)
        with graph:
            made = step()
        torch.testing.assert_close(step().cpu(), expected)
        graph.replay()
        torch.testing.assert_close(made.cpu(), expected)


def _transposed() -> Tensor:
    return torch.arange(6.0).reshape(2, 3).t().to("xla")


UPLOADS: dict[str, Callable[[], Any]] = {
    "to": lambda: torch.arange(6.0).to("xla"),
    "another type": lambda: torch.arange(6.0).to("xla", torch.bfloat16),
    "whole numbers": lambda: torch.arange(6).to("xla"),
    "a part": lambda: torch.arange(6.0)[1::2].to("xla"),
    "expanded": lambda: torch.ones(1, 3).expand(2, 3).to("xla"),
    "a view of complex numbers": lambda: torch.arange(4.0).to(torch.complex64).mul(1j).conj().to("xla"),
    "transposed": _transposed,
    "channels last": lambda: torch.ones(1, 2, 2, 2).to("xla", memory_format=torch.channels_last),
    "tensor": lambda: torch.tensor([1, 2], device="xla"),
    "nothing": lambda: torch.zeros(0, 3).to("xla"),
    "a module": lambda: list(nn.Linear(2, 2).to("xla").parameters()),
    "a batch": lambda: xm.send_cpu_data_to_device({"x": torch.ones(2), "y": torch.tensor(3)}, "xla:0"),
}


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


class TestOtherThreads:
    @pytest.mark.parametrize("name", UPLOADS)
    def test_what_they_upload_is_no_operator(self, name: str) -> None:
        torch.manual_seed(0)
        before = pytree.tree_leaves(UPLOADS[name]())
        x = torch.ones(3).to("xla")
        made: list[Any] = []

        def step() -> Tensor:
            torch.manual_seed(0)
            made.extend(pytree.tree_leaves(in_thread(UPLOADS[name])))
            return x + 1

        graph, y = captured(step)
        graph.replay()
        assert y.tolist() == [2] * 3
        for one, other in zip(made, before, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            torch.testing.assert_close(one.cpu(), other.cpu())

    def test_it_is_memory_of_the_graph(self) -> None:
        made: list[Tensor] = []

        def step() -> Tensor:
            made.append(in_thread(lambda: torch.ones(3).to("xla")))
            return made[0] * 2

        graph, y = captured(step)
        for value in (1.0, 5.0):
            made[0].copy_(torch.full((3,), value))
            graph.replay()
            assert y.tolist() == [2 * value] * 3

    def test_they_record_while_it_compiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, lower = torch.ones(3).to("xla"), compiler.lower
        made: list[Tensor] = []

        def lower_meanwhile(*arguments: Any) -> Any:
            made.append(in_thread(lambda: x * 7))
            return lower(*arguments)

        monkeypatch.setattr(compiler, "lower", lower_meanwhile)
        graph, y = captured(lambda: x.mul(1.5).erfinv())
        monkeypatch.undo()
        graph.replay()
        assert made[0].tolist() == [7] * 3 and not y.isfinite().any()


class TestInterrupts:
    @pytest.fixture
    def stops(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        class Stopping(_bindings.Capture):  # type: ignore[misc]  # of the extension
            def begin(self) -> None:
                super().begin()
                raise KeyboardInterrupt

        monkeypatch.setattr(_bindings, "Capture", Stopping)
        yield

    def test_a_capture_that_is_interrupted_as_it_begins(self, stops: None) -> None:
        x = torch.ones(3).to("xla")
        with pytest.raises(KeyboardInterrupt):
            torch_xla.Graph().capture_begin()
        assert not _bindings.is_captured(0)
        assert (x + 1).tolist() == [2] * 3
