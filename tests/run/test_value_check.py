"""Values that PyTorch refuses: numbers in every graph, whatever its size; PyTorch's error where values are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes import setting

import torch_xla
from torch_xla import _config

F = torch.nn.functional


def _i(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values).to(device)


def _some(device: str, *values: bool) -> torch.Tensor:
    return torch.tensor(values).to(device)


def _put(device: str) -> torch.Tensor:
    x = torch.arange(4).to(device)
    x[_some(device, True, False, True, False)] = _i(device, 7, 8, 9)
    return x


# What docs/caveats.md says.
NUMBERS: dict[str, tuple[Callable[[str], torch.Tensor], list[Any]]] = {
    "index": (lambda d: torch.arange(5).to(d)[_i(d, 20, -20, -1)], [4, 0, 4]),
    "embedding": (lambda d: F.embedding(_i(d, 20, 1), torch.arange(3.0)[:, None].to(d)), [[2.0], [1.0]]),
    "gather": (lambda d: torch.arange(5).to(d).gather(0, _i(d, 20)), [4]),
    "write": (lambda d: torch.arange(3).to(d).index_put((_i(d, 20, 1),), _i(d, 9, 9)), [0, 9, 2]),
    "scatter": (lambda d: torch.arange(3).to(d).scatter(0, _i(d, 20), 9), [0, 1, 2]),
    "masked write": (_put, [7, 1, 8, 3]),
    "quotient": (lambda d: _i(d, 7, -7) // _i(d, 0, 0), [-1, -2]),
    "remainder": (lambda d: _i(d, 7, -7) % _i(d, 0, 0), [7, -7]),
    "target": (lambda d: F.nll_loss(torch.zeros(2, 3).to(d), _i(d, 0, 9), reduction="none").isnan(), [False, True]),
    # Made of others here, of which another raises.
    "classes": (lambda d: F.one_hot(_i(d, 1, 9), 3), [[0, 1, 0], [0, 0, 0]]),
}


@pytest.mark.parametrize("compute, number", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.compiled("it is what the graph's size must not decide", reads=False)
def test_a_number_whatever_the_size_of_the_graph(compute, number, on_host):
    with setting(_config.XLA_HOST_COMPUTE, "reads" if on_host else "never"):
        assert compute("xla").tolist() == number


@pytest.mark.parametrize("compute", [call for call, _ in NUMBERS.values()][:-1], ids=list(NUMBERS)[:-1])
def test_the_error_of_the_cpu_where_values_are_checked(compute):
    with pytest.raises(Exception) as expected:
        compute("cpu")
    with setting(_config.XLA_CHECK_VALUES, True):
        with pytest.raises(type(expected.value)) as got:
            compute("xla").tolist()
        text, place = str(got.value).rsplit("\n", 1)
        assert text == str(expected.value)
        assert place.startswith("  recorded at ") and "test_value_check.py" in place
        assert (torch.ones(2, device="xla") + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.by_default("it says itself how graphs run")
@pytest.mark.own_client("programs of other devices have no kernel that refuses values")
def test_masked_scatter_of_too_few_values_is_refused(checked, hot):
    x, mask = torch.zeros(3).to("xla"), _some("xla", True, True, True)
    with setting(_config.XLA_CHECK_VALUES, checked), setting(_config.XLA_HOST_COMPUTE, "new" if hot else "reads"):
        assert x.masked_scatter(_some("xla", True, False, True), torch.ones(2).to("xla")).tolist() == [1.0, 0.0, 1.0]
        kept = x + 2
        lost = x.masked_scatter_(mask, torch.tensor([1.0, 2.0]).to("xla")) + 1
        with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
            lost.tolist()
        assert kept.tolist() == [2.0, 2.0, 2.0]


def test_what_does_not_depend_on_a_refused_value_is_computed():
    x = torch.arange(5.0).to("xla")
    with setting(_config.XLA_CHECK_VALUES, True):
        lost, kept = x[_i("xla", 9)] + 1, x * 2
        with pytest.raises(IndexError):
            torch_xla.sync()
        assert kept.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
            lost.tolist()


def test_checked_training_is_the_same():
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).to("xla")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        results = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.ones(2, 4, device="xla")), _i("xla", 0, 2))
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            results.append(loss.detach())
        return torch.stack(results).tolist()

    plain = losses()
    with setting(_config.XLA_CHECK_VALUES, True):
        assert losses() == pytest.approx(plain, rel=1e-5)


def test_numbers_that_were_equal_differ_later():
    with setting(_config.XLA_CHECK_VALUES, True):
        for k in range(3):
            x = torch.ones(3, dtype=torch.float64).to("xla")
            want = torch.ones(3, dtype=torch.float64)
            for i in range(6):
                factor = 1 + 0.1 * k * (i + 1)
                x, want = torch.tanh(x) * factor, torch.tanh(want) * factor
            torch_xla.sync()
            torch.testing.assert_close(x.cpu(), want)
