"""Operators whose results have as many elements as a mask selects: the number is read, and the rest is recorded.

How many numbers have had programs is kept for each layout of the arguments, so each test has sizes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import refused_alike
from conftest import Counting
from probes import sampled
from torch import Tensor

import torch_xla
import torch_xla.debug.metrics as met

READ = "aten::_local_scalar_dense"
ON_HOST = ("aten::index", "aten::masked_select", "aten::nonzero")


def given(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 5, 4, generator=generator)
    chosen = {
        "x": x,
        "rows": torch.rand(6, generator=generator) > 0.4,
        "plane": torch.rand(6, 5, generator=generator) > 0.5,
        "whole": x > 0,
        "last": torch.tensor([True, False, True, True]),
        "none": torch.zeros(6, dtype=torch.bool),
        "numbers": torch.tensor([0, 2, 1]),
    }
    return {name: t.to(device) for name, t in chosen.items()}


SELECTIONS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "first dimension": lambda g: g["x"][g["rows"]],
    "two dimensions": lambda g: g["x"][g["plane"]],
    "all dimensions": lambda g: g["x"][g["whole"]],
    "last dimension": lambda g: g["x"][:, :, g["last"]],
    "beside a number": lambda g: g["x"][g["plane"], 0],
    "beside indices": lambda g: g["x"][None][:, g["rows"], :, None, g["numbers"].new_zeros(1)],
    "two masks": lambda g: g["x"][:3][g["rows"].new_tensor([True, True, True]), :, g["last"]],
    "nothing": lambda g: g["x"][g["none"]],
    "a mask that is made of others": lambda g: g["x"][g["rows"] & ~g["none"]],
    "a mask from a comparison": lambda g: g["x"][g["x"][:, 0, 0] > 0],
    "a view": lambda g: g["x"].transpose(0, 2)[g["last"]],
    "a host mask": lambda g: g["x"][g["plane"].cpu()],
    "masked_select": lambda g: g["x"].masked_select(g["whole"]),
    "masked_select of a broadcast mask": lambda g: g["x"].masked_select(g["last"]),
    "masked_select of a broadcast tensor": lambda g: g["last"].masked_select(g["whole"]),
    "nonzero": lambda g: g["whole"].nonzero(),
    "nonzero of numbers": lambda g: g["numbers"].nonzero(),
    "argwhere": lambda g: torch.argwhere(g["plane"]),
    "where": lambda g: torch.where(g["plane"]),
}


class TestValues:
    @pytest.mark.parametrize("program", SELECTIONS.values(), ids=SELECTIONS)
    def test_as_on_the_cpu(self, program: Callable[[dict[str, Tensor]], Any]) -> None:
        expected = program(given("cpu"))
        before = {op: met.counter_value(op) for op in ON_HOST}
        got = program(given("xla"))
        assert {op: met.counter_value(op) for op in ON_HOST} == before
        many = isinstance(expected, tuple)
        for mine, theirs in zip(got if many else (got,), expected if many else (expected,), strict=True):
            assert mine.device.type == "xla" and mine.stride() == theirs.stride()
            assert mine.dtype == theirs.dtype and torch.equal(mine.cpu(), theirs)

    def test_gradients(self) -> None:
        def program(device: str) -> Tensor:
            g = given(device)
            x = g["x"].requires_grad_()
            (x[g["plane"]] ** 2).sum().backward()
            (x.masked_select(g["whole"]) ** 3).sum().backward()
            x[g["rows"], 1].sum().backward()
            assert x.grad is not None
            return x.grad.cpu()

        torch.testing.assert_close(program("xla"), program("cpu"))

    @pytest.mark.parametrize(
        "program",
        [
            lambda g: g["x"][g["last"]],
            lambda g: g["x"][g["rows"], g["whole"]],
            lambda g: g["x"].masked_select(g["rows"]),
            lambda g: g["x"].masked_select(g["numbers"]),
        ],
    )
    def test_mistakes_raise_as_on_the_cpu(self, program: Callable[[dict[str, Tensor]], Any]) -> None:
        refused_alike(lambda device: program(given(device)))

    def test_in_eager_mode(self) -> None:
        with torch_xla.experimental.eager_mode_context(True):
            got = {name: program(given("xla")) for name, program in SELECTIONS.items()}
        for name, program in SELECTIONS.items():
            expected = program(given("cpu"))
            for mine, theirs in zip(got[name], expected, strict=True):
                assert torch.equal(mine.cpu(), theirs)


class TestLoops:
    def test_a_mask_that_stays_is_read_once(self, compiles: Counting, counted: Counting) -> None:
        """As of the nodes that a graph network trains on."""
        model = torch.nn.Linear(7, 3)
        x, y, mask = torch.randn(23, 7), torch.randint(3, (23,)), torch.rand(23) > 0.5

        def train(device: str) -> list[float]:
            torch.manual_seed(1)
            model.reset_parameters()
            m, (a, b, chosen) = model.to(device), (t.to(device) for t in (x, y, mask))
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            losses = []
            for _ in range(5):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(m(a)[chosen], b[chosen])
                loss.backward()
                optimizer.step()
                torch_xla.sync()
                losses.append(loss.detach())
            return [loss.item() for loss in losses]

        expected = train("cpu")
        with compiles(1), counted("aten::index", 0), counted(READ, 1 + 5):  # and the losses at the end
            assert train("xla") == pytest.approx(expected, rel=1e-4)

    def test_new_masks_with_as_many_elements_have_one_program(self, compiles: Counting, counted: Counting) -> None:
        x = torch.arange(29.0).to("xla")
        with compiles(1), counted(READ, 4), sampled("TransferFromDeviceTime", 0):  # the masks are still on the host
            for i in range(4):
                mask = (torch.arange(29) % 4 == 1).roll(i).to("xla")
                picked = (x * 2)[mask]
                torch_xla.sync()
        assert picked.tolist() == [2.0 * i for i in range(29) if (i - 3) % 29 % 4 == 1]

    def test_a_number_that_varies_runs_on_the_host_in_the_end(self, counted: Counting) -> None:
        x = torch.arange(31.0)
        device = x.to("xla")
        with counted("aten::index", 3):
            for number in range(1, 8):
                mask = torch.arange(31) < number
                assert device[mask.to("xla")].tolist() == x[mask].tolist()
        with counted("aten::index", 0):  # one that has a program; the mask is on the host, so its number is known
            assert device[torch.arange(31) < 2].tolist() == [0, 1]

    def test_a_result_of_the_step_runs_on_the_host(self, compiles: Counting, counted: Counting) -> None:
        x = torch.rand(37, 8).to("xla")
        with counted("aten::index", 1), compiles():
            scores = torch.nn.functional.softmax(torch.nn.functional.gelu((x - 0.5) @ x.mT @ x), -1)
            kept = scores[(scores * 2).amax(-1) > 0.3]
        assert 0 < len(kept) <= 37
        assert torch.equal(kept.cpu(), scores.cpu()[scores.cpu().amax(-1) * 2 > 0.3])

    def test_a_mask_that_is_written_is_read_again(self) -> None:
        x, mask = torch.arange(41.0).to("xla"), (torch.arange(41) < 3).to("xla")
        assert len(x[mask]) == 3
        mask[7] = True
        assert x[mask].tolist() == [0, 1, 2, 7]
        mask.logical_not_()
        torch_xla.sync()
        assert len(x[mask]) == 37
        mask[:] = False
        assert len(x[mask]) == 0 and mask.nonzero().shape == (0, 1)

    def test_what_comes_before_is_not_computed_for_it(self, compiles: Counting) -> None:
        x, mask = torch.rand(43, 3).to("xla"), (torch.arange(43) % 2 == 0).to("xla")
        with compiles(0):
            y = (x.cos() + 1)[mask]
        with compiles(1):
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), (x.cpu().cos() + 1)[::2])
