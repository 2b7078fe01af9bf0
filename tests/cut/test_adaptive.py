"""Numbers that are constants of a graph until they vary: where parts of tensors begin, ends of ranges, exponents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from conftest import Counting
from torch.nn.functional import huber_loss, smooth_l1_loss

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla._core.graph import graph
from torch_xla._core.report import recompiles
from torch_xla.experimental import eager_mode_context

Read = Callable[[torch.Tensor, int], torch.Tensor]
Write = Callable[[torch.Tensor, int], Any]
Twice = Callable[..., list[Any]]

READS: dict[str, Read] = {
    "row": lambda x, i: x[i] * 2.5,
    "row from the end": lambda x, i: x[-1 - i] * 2.5,
    "column": lambda x, i: x[:, i].sin(),
    "element": lambda x, i: x[i, 2 * i] * 2.5,
    "batch": lambda x, i: x[3 * i : 3 * i + 3].cos(),
    "batch from the end": lambda x, i: x[-3 * i - 4 : -3 * i - 1].cos(),
    "every third": lambda x, i: x[:, i : i + 13 : 3].cos(),
    "part of a part": lambda x, i: x[i : i + 8, 1:9][2:5, i] * 2.5,
    "end beyond": lambda x, i: x[-3 : 20 + i] * 2.5,
    "narrow": lambda x, i: x.narrow(1, i, 4) * 2.5,
    "split": lambda x, i: x.split(4)[i].exp(),
    "split by sizes": lambda x, i: x.split([3, 3, 3, 3, 3, 5], 1)[i].exp(),
    "chunk": lambda x, i: x.chunk(5)[i].exp(),
    "unbind": lambda x, i: x.unbind(1)[i].exp(),
    "triangle": lambda x, i: x.tril(i - 2) + x.triu(2 * i),
    "range": lambda x, i: x[0, :4] * torch.arange(i, i + 4, device=x.device),
    "range of floats": lambda x, i: x[0, :4] * torch.arange(i + 0.5, i + 4.5, device=x.device),
    "even spaces": lambda x, i: x[0, :4] * torch.linspace(i, 3 * i + 1.5, 4, device=x.device),
    "power": lambda x, i: x ** (2 - i),
    "root": lambda x, i: x ** (1 / (i + 1.5)),
    "power in place": lambda x, i: x.clone().pow_(0.5 * i),
    "power of integers": lambda x, i: x.int() ** (2 + i),
    "smooth loss": lambda x, i: smooth_l1_loss(x, x.flip(0), beta=i + 0.5) * 2.5,
    "Huber loss": lambda x, i: huber_loss(x, x.flip(0), delta=i + 0.5) * 2.5,
}

WRITES: dict[str, Write] = {
    "row": lambda x, i: x[i].mul_(2.5),
    "batch": lambda x, i: x[3 * i : 3 * i + 3].add_(2.5),
    "batch from itself": lambda x, i: x.__setitem__(slice(3 * i, 3 * i + 3), x[3 * i : 3 * i + 3].flip(0)),
    "every third": lambda x, i: x[:, i : i + 13 : 3].fill_(i + 0.5),
    "part of a part": lambda x, i: x[i : i + 8][2:5, i].zero_(),
    "split": lambda x, i: x.split(4)[i].mul_(2.5),
    "unbind": lambda x, i: x.unbind(1)[i].mul_(2.5),
    "end beyond": lambda x, i: x[-3 : 20 + i].mul_(2.5),
    "two": lambda x, i: (x[:, i].add_(1.5), x[2 * i].mul_(2.5)),
}


def made() -> tuple[torch.Tensor, torch.Tensor]:
    """The same values on the host and on a device that knows no graph."""
    x = torch.arange(400.0).reshape(20, 20).div(50).contiguous()
    copy = x.to("xla")
    torch_xla.sync()
    cache.clear()
    return x, copy


@pytest.fixture
def twice(compiles: Counting) -> Twice:
    """Calls a function with one number per step, each with a barrier, which compiles two graphs."""

    def run(step: Callable[[int], Any], numbers: Iterable[int] = range(5)) -> list[Any]:
        results = []
        with compiles(2):
            for i in numbers:
                results.append(step(i))
                torch_xla.sync()
        return results

    return run


@pytest.mark.parametrize("name", READS)
def test_reads_compile_twice(name: str, twice: Twice) -> None:
    host, x = made()
    for i, y in enumerate(twice(lambda i: READS[name](x, i))):
        torch.testing.assert_close(y.cpu(), READS[name](host, i))


@pytest.mark.parametrize("name", WRITES)
def test_writes_compile_twice(name: str, twice: Twice) -> None:
    host, x = made()
    twice(lambda i: WRITES[name](x, i))
    for i in range(5):
        WRITES[name](host, i)
    torch.testing.assert_close(x.cpu(), host)


@pytest.mark.compiled(
    "the gradient of a product reads whether a factor is zero, which compiles nothing in use", reads=False
)
def test_gradients(twice: Twice) -> None:
    host, x = made()
    for t in (host, x):
        t.requires_grad_()
        t.grad = torch.zeros_like(t)
    torch_xla.sync()

    def loss(x: torch.Tensor, i: int) -> torch.Tensor:
        y = x + 0.1
        losses = smooth_l1_loss(y, x.flip(0), beta=i + 0.5) + huber_loss(x, x.flip(1), delta=i + 0.5)
        parts = x[3 * i : 3 * i + 7 : 2].sin().sum() + x[i].cos().sum() * x[:, -1 - i].sin().prod()
        return (parts + losses + (y ** (i + 0.5)).mean()) * 2.5

    twice(lambda i: loss(x, i).backward())
    for i in range(5):
        loss(host, i).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), host.grad)


@pytest.mark.parametrize(
    ("draw", "low", "high"),
    [
        (lambda x, i: torch.randint(0, 10 * i, x.shape, device=x.device), lambda i: 0, lambda i: 10 * i - 1),
        (lambda x, i: torch.randint(i, 2 * i, x.shape, device=x.device), lambda i: i, lambda i: 2 * i - 1),
        (lambda x, i: torch.empty_like(x).uniform_(-i, i), lambda i: -i, lambda i: i),
        (lambda x, i: torch.empty_like(x).uniform_(0, i / 2), lambda i: 0, lambda i: i / 2),
    ],
)
def test_ranges_of_random_numbers(draw: Read, low: Any, high: Any, twice: Twice) -> None:
    made()
    x = torch.zeros(50, 50).to("xla")
    for i, y in enumerate(twice(lambda i: draw(x, i), range(2, 7)), 2):
        span = high(i) - low(i)
        assert low(i) <= y.min().item() <= low(i) + 0.01 * span
        assert high(i) - 0.01 * span <= y.max().item() <= high(i)


@pytest.mark.parametrize(
    ("draw", "median"),
    [
        (lambda x, i: x.exponential_(i), lambda i: 0.6931 / i),
        (lambda x, i: x.cauchy_(i, 0.1 * i), lambda i: i),
        (lambda x, i: x.log_normal_(0.1 * i, 0.2 * i), lambda i: math.exp(0.1 * i)),
    ],
)
def test_parameters_of_random_numbers(draw: Read, median: Any, twice: Twice) -> None:
    made()
    x = torch.zeros(100, 100).to("xla")
    for i, y in enumerate(twice(lambda i: draw(torch.empty_like(x), i), range(1, 6)), 1):
        assert y.median().item() == pytest.approx(median(i), rel=0.05)


def test_chances(twice: Twice) -> None:
    made()
    x = torch.ones(100, 100).to("xla")
    kept = twice(lambda i: (torch.nn.functional.dropout(x, i / 10) != 0).float().mean() * 1.5, range(1, 6))
    assert [y.item() / 1.5 for y in kept] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5], abs=0.03)


COUNTS = pytest.mark.compiled("it reads how many batches there were, which compiles nothing in use", reads=False)


@pytest.mark.parametrize("momentum", [pytest.param(None, marks=COUNTS), 0.3])
def test_momentum_of_batch_norm(momentum: float | None, twice: Twice) -> None:
    norms = [torch.nn.BatchNorm1d(20, momentum=momentum) for _ in range(2)]
    norms[1].to("xla")
    host, x = made()

    def step(norm: torch.nn.BatchNorm1d, x: torch.Tensor, i: int) -> torch.Tensor:
        norm.momentum = momentum and momentum / i
        return norm(x * (i + 0.5))

    result = twice(lambda i: step(norms[1], x, i), range(1, 6))
    for i, y in enumerate(result, 1):
        torch.testing.assert_close(y.cpu(), step(norms[0], host, i), rtol=1e-4, atol=1e-5)
    for name, statistic in norms[1].state_dict().items():
        torch.testing.assert_close(statistic.cpu(), norms[0].state_dict()[name])


def test_rows_of_an_iteration(twice: Twice) -> None:
    host, x = made()
    rows = iter(x)
    result = twice(lambda _: next(rows) * 2.5, range(20))
    torch.testing.assert_close(torch.stack(result).cpu(), host * 2.5)


def test_only_what_varies_is_an_input() -> None:
    _, x = made()
    given = []
    for i in range(3):
        y = x[i : i + 4, 5:9] * 2.5
        torch_xla.sync()
        del y
        z = x[i : i + 4, 5:9] * 2.5
        described = graph.describe(_bindings.Cut.of_tensors([z], _bindings.Cut.Scope.LIVE).graph())
        given.append([number.value for node in described.nodes for number in node.numbers()])
        del z
    # The first batch, the second and the third: where it begins and ends, after that where the columns do.
    assert given == [[2.5], [1, 5, 2.5], [2, 6, 2.5]]


def test_looking_at_a_graph_decides_nothing(compiles: Counting) -> None:
    _, x = made()
    y = x[3] * 2.5
    torch_xla.sync()
    del y
    for i in range(3):
        y = x[i] * 2.5
        assert f"aten::select.int(%p0, 0, {i})" in torch_xla._XLAC._get_xla_tensors_text([y])
        del y
    with compiles(0):
        y = x[3] * 2.5
        torch_xla.sync()
        assert y.device.type == "xla"


def test_a_loop_without_variation_has_constants(compiles: Counting) -> None:
    _, x = made()
    with compiles(1):
        for _ in range(3):
            y = x[3:7, 1] * 2.5
            numbers = graph.describe(_bindings.Cut.of_tensors([y], _bindings.Cut.Scope.LIVE).graph()).nodes[0].numbers()
            assert not numbers
            torch_xla.sync()


def test_the_reason_says_so() -> None:
    _, x = made()
    recompiles.clear()
    for i in range(4):
        y = x[5 * i : 5 * i + 5] * 2.5
        torch_xla.sync()
        assert y.device.type == "xla"
    (result,) = recompiles.records()
    assert (
        result.differences[0].text
        == "argument 2 of aten.slice.Tensor went from 0 to 5; it is an input of the program from now on"
    )


def test_eager_mode(compiles: Counting) -> None:
    host, x = made()
    with eager_mode_context(True), compiles(2):
        results = [x[i : i + 4].sin() for i in range(6)]
    for i, y in enumerate(results):
        torch.testing.assert_close(y.cpu(), host[i : i + 4].sin())


def test_operators_with_other_constants_are_others() -> None:
    host = torch.arange(-50_000, 50_000) % 17 - 8
    x = host.to("xla")
    torch_xla.sync()

    def bounded(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(0, 5) * 3 + x.clamp(-3, 0) * 5  # the constant is one bound, the input the other

    y = bounded(x)
    torch_xla.sync()
    assert torch.equal(y.cpu(), bounded(host))


def test_a_refused_number_is_told_at_once() -> None:
    host, x = made()
    for order in (3, 1):
        torch.testing.assert_close(x.renorm(order, 0, 2).cpu(), host.renorm(order, 0, 2))
    with pytest.raises(RuntimeError, match="^renorm: non-positive-norm not supported"):
        x.renorm(0, 0, 2)


def test_views_stay_views() -> None:
    host, x = made()
    for t in (host, x):
        a, b, *_ = t.split(4)
        first, second, *_ = t.unbind(1)
        t[2:6].mul_(3)
        b[1].fill_(0.5)
        second[4:].add_(first[4:])
        a.t_()
        a[0].neg_()
        torch_xla.sync()
        assert (a.storage_offset(), b.storage_offset(), second.storage_offset()) == (0, 80, 1)
        assert (a.stride(), b.stride(), second.stride()) == ((1, 20), (20, 1), (20,))
    torch.testing.assert_close(x.cpu(), host)


def test_what_is_out_of_range_is_told_at_once() -> None:
    _, x = made()
    xm.wait_device_ops()
    for i in range(18, 23):
        if i < 20:
            (x[i] * 2.5).cpu()
        else:
            with pytest.raises(IndexError, match=f"index {i} is out of bounds for dimension 0 with size 20"):
                x[i]


CONSTANTS: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], list[Any]]] = {
    "complex exponents": (lambda x, c: torch.pow(x + 1j, c), [1.5 + 2j, 3 - 1j, -2j, complex(0.0, -0.0)]),
    "complex bases": (lambda x, c: torch.pow(c, x + 1j), [1.5 + 2j, 3 - 1j, 2.0]),
    "kinds of number": (lambda x, c: torch.pow(x, c), [2, 2.0, 2 + 0j, True]),
    "kinds of factor": (lambda x, c: x.int() * c, [1, 1.0, True, 1 + 0j]),
    "signs of zero": (lambda x, c: torch.copysign(x + 1, c), [0.0, -0.0, 0]),
    "what is no number": (lambda x, c: torch.nan_to_num(x / 0, nan=c, posinf=c), [0.0, -0.0, math.nan, math.inf, 2.0]),
    "switches": (lambda x, c: x.view(2, 3).sum(1, keepdim=c).sin(), [True, False]),
    "dtypes": (lambda x, c: torch.cumsum(x, 0, dtype=c) / 3, [torch.float32, torch.float64, torch.int32]),
    "dtypes of a sum": (lambda x, c: x.sum(dtype=c), [torch.int64, torch.int32, torch.float64]),
    "names": (lambda x, c: torch.div(x - 2.5, 2, rounding_mode=c), ["floor", "trunc", None]),
    "unsigned": (lambda x, c: torch.full((3,), c, dtype=torch.uint64, device=x.device), [2**63 - 1, 1, 2]),
    "lists": (lambda x, c: x.view(1, 2, 3).flip(c), [[1], [2], [1, 2], []]),
    "layouts": (lambda x, c: x.view(2, 3).t().clone(memory_format=c), [torch.preserve_format, torch.contiguous_format]),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_every_kind_are_told_apart(name: str) -> None:
    function, constants = CONSTANTS[name]
    host = torch.arange(6.0)
    x = host.to("xla")
    torch_xla.sync()
    for c in [*constants, *constants]:
        result, expected = function(x, c), function(host, c)
        torch_xla.sync()
        torch.testing.assert_close(result.cpu(), expected, equal_nan=True)
        assert result.stride() == expected.stride()
        assert torch.equal(torch.signbit(result.cpu().real.double()), torch.signbit(expected.real.double()))
