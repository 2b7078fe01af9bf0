"""Grouped products, which layers of experts take: each stretch of rows times a matrix of its own."""

from __future__ import annotations

import jax
import pytest
import torch
from agreement import refused_alike
from torch.nn.functional import grouped_mm

import torch_xla
from torch_xla._core.compile import cache
from torch_xla.ops import grouped

ROWS, INNER, OUTER = 150, 16, 24
ENDS = [[20, 150], [0, 64, 64, 150], [0, 0, 0, 150], [129, 130, 150, 150], [1, 2, 3, 140]]


def experts(groups: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(groups, OUTER, INNER, dtype=dtype).transpose(-2, -1)


def ends_of(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_values_and_gradients(ends: list[int], dtype: torch.dtype) -> None:
    results = {}
    torch.manual_seed(0)
    rows, matrices, grad = torch.randn(ROWS, INNER, dtype=dtype), experts(len(ends), dtype), torch.randn(ROWS, OUTER)
    grad[ends[-1] :] = 0
    for device in ("cpu", "xla"):
        x, y = (t.detach().to(device).requires_grad_() for t in (rows, matrices))
        out = grouped_mm(x, y, offs=ends_of(ends).to(device))
        out.backward(grad.to(device, dtype))
        assert x.grad is not None and y.grad is not None
        # PyTorch leaves rows after the last stretch as they were in memory.
        results[device] = [out[: ends[-1]].detach(), x.grad[: ends[-1]], y.grad]
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.1}
    torch.testing.assert_close(results["xla"], results["cpu"], check_device=False, **near)


@pytest.mark.parametrize(
    ("shapes", "ends"), [([(4, 8, 16), (16, 32)], [8, 8, 20, 32]), ([(4, 8, 16), (4, 16, 32)], None)], ids=str
)
def test_layouts(shapes: list[tuple[int, ...]], ends: list[int] | None) -> None:
    x, y = (torch.randn(*shape) for shape in shapes)
    offs = None if ends is None else ends_of(ends)
    ours = grouped_mm(x.to("xla"), y.to("xla"), offs=None if offs is None else offs.to("xla"))
    torch.testing.assert_close(ours.cpu(), grouped_mm(x, y, offs=offs))


def test_one_program_serves_every_routing(compiles) -> None:
    rows, matrices = torch.randn(ROWS, INNER), experts(4, torch.float32)
    x, y = rows.to("xla"), matrices.to("xla")
    torch_xla.sync()
    cache.clear()  # others compile the same
    results = []
    with compiles(1):
        for ends in ENDS[1:]:
            offs = ends_of(ends).to("xla")
            results.append(grouped_mm(x, y, offs=offs))
            torch_xla.sync()
    for ends, ours in zip(ENDS[1:], results, strict=True):
        theirs = grouped_mm(rows, matrices, offs=ends_of(ends))
        torch.testing.assert_close(ours.cpu()[: ends[-1]], theirs[: ends[-1]])


@pytest.mark.parametrize(
    ("rows", "ends"), [(ROWS, [60, 30, 150, 10]), (ROWS, [-5, 70, 400, 150]), (0, [0, 0])], ids=str
)
def test_ends_that_go_back_or_too_far_come_to_an_end(rows: int, ends: list[int]) -> None:
    x, matrices = torch.ones(rows, INNER, device="xla"), experts(len(ends), torch.float32).to("xla")
    assert grouped_mm(x, matrices, offs=ends_of(ends).to("xla")).cpu().shape == (rows, OUTER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_the_way_of_other_platforms_gives_the_same(ends: list[int], dtype: torch.dtype) -> None:
    x, y = (jax.random.normal(jax.random.key(k), (ROWS, INNER)).astype(str(dtype).split(".")[1]) for k in (0, 1))
    matrices = jax.random.normal(jax.random.key(2), (len(ends), INNER, OUTER)).astype(x.dtype)
    places = jax.numpy.asarray(ends, "int32")
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for one, other, operands in (
        (grouped._rows_in_blocks, grouped._rows_at_once, (x, matrices)),
        (grouped._contracted_in_blocks, grouped._contracted_at_once, (x, y)),
    ):
        ours, theirs = (f(*operands, places).astype("float32") for f in (one, other))
        assert jax.numpy.allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("x", "y", "ends"),
    [
        (torch.ones(8, 16), torch.ones(3, 16, 5), [2, 4, 8]),
        (torch.ones(8, 16), torch.ones(3, 16, 8), [2, 8]),
        (torch.ones(8, 12), torch.ones(3, 16, 8), [2, 4, 8]),
        (torch.ones(8, 16).double(), torch.ones(3, 16, 8).double(), [2, 4, 8]),
        (torch.ones(8, 16), torch.ones(3, 16, 8), None),
        (torch.ones(3, 8, 16), torch.ones(3, 16, 8), [2, 4, 8]),
    ],
    ids=["alignment", "number of ends", "sizes", "type", "no ends", "needless ends"],
)
def test_mistakes_are_told_at_the_call(x: torch.Tensor, y: torch.Tensor, ends: list[int] | None) -> None:
    offs = lambda device: None if ends is None else ends_of(ends).to(device)  # noqa: E731
    refused_alike(lambda device: grouped_mm(x.to(device), y.to(device), offs=offs(device)))
