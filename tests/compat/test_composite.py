"""Parts of a graph as StableHLO composites."""

from __future__ import annotations

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla._core.lower.composites import Boundary, CompositeRegion, plan
from torch_xla.experimental.mark_pattern_utils import StableHLOCompositeBuilder
from torch_xla.experimental.xla_marker import serialize_composite_attr
from torch_xla.stablehlo import exported_program_to_stablehlo

X, Y = torch.arange(4.0), torch.full((4,), 3.0)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.builder = StableHLOCompositeBuilder("own.pair", {"s": "text", "f": 0.5, "i": 2, "l": [1, 2], "b": True})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = self.builder.mark_inputs(x + 1, y)
        inner = a * b
        total, difference = inner + torch.arange(4, device=x.device), inner - 2.5
        total, difference = self.builder.mark_outputs(total, difference)
        return total, difference.relu(), inner.sum()  # the last is no result of the composite


def composites(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if f'stablehlo.composite "{name}"' in line]


def test_an_exported_module_has_them() -> None:
    module = exported_program_to_stablehlo(torch.export.export(Model(), (X, Y)))
    text = module.get_stablehlo_text()
    (line,) = composites(text, "own.pair")
    attributes = 'b = true, f = 5.000000e-01 : f32, i = 2 : i64, l = dense<[1, 2]> : tensor<2xi64>, s = "text"'
    assert f"{{composite_attributes = {{{attributes}}}, decomposition = @own.pair.impl}}" in line
    assert line.endswith(": (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)")
    meaning = text[text.index("func.func private @own.pair.impl") :]
    assert "stablehlo.subtract" in meaning and "stablehlo.maximum" not in meaning
    for actual, expected in zip(module(X, Y), Model()(X, Y), strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


def test_a_recorded_graph_has_them(compiles) -> None:
    model = Model()
    text = xm.get_stablehlo(list(model(X.to("xla"), Y.to("xla"))))
    assert len(composites(text, "own.pair")) == 1 and "mark" not in text
    torch_xla.sync()
    with compiles(1):
        for _ in range(2):
            x = X.to("xla").requires_grad_()
            actual = model(x, Y.to("xla"))
            torch_xla.sync()
    for result, expected in zip(actual, model(X, Y), strict=True):
        torch.testing.assert_close(result.detach().cpu(), expected)
    actual[0].sum().backward()
    assert torch.equal(x.grad.cpu(), Y)


def test_a_barrier_inside_leaves_none() -> None:
    builder = StableHLOCompositeBuilder("own.cut")
    x = builder.mark_inputs(X.to("xla")).sin()
    torch_xla.sync()
    y = builder.mark_outputs(x.cos())
    assert not composites(xm.get_stablehlo([y]), "own.cut")
    torch.testing.assert_close(y.cpu(), X.sin().cos())


def test_random_numbers_and_equal_composites() -> None:
    results = []
    torch.manual_seed(3)
    for factor in (1.0, 2.0):
        builder = StableHLOCompositeBuilder("own.noise")
        a = builder.mark_inputs(X.to("xla") * factor)
        results.append(builder.mark_outputs(a + torch.rand(4, device="xla")))
    text = xm.get_stablehlo(results)
    assert len(composites(text, "own.noise")) == 2
    noise = [(r.cpu() - X * f) for r, f in zip(results, (1.0, 2.0), strict=True)]
    assert all(((n >= 0) & (n < 1)).all() for n in noise) and not torch.allclose(*noise)


@pytest.mark.parametrize("attr", [{"a": None}, {"a": [1, 2.0]}, {"a": []}, {1: 2}, {"a": ["x"]}, "text"])
def test_attributes_that_have_no_place_in_a_module(attr) -> None:
    with pytest.raises(ValueError, match=r"\[mark_tensor\] got "):
        serialize_composite_attr(attr)


def mark(name: str, is_input: bool, position: int = 0) -> Boundary:
    return Boundary(name, position, "0", is_input, {})


def order(steps: list) -> list:
    return [(step.name, step.members) if isinstance(step, CompositeRegion) else step for step in steps]


@pytest.mark.parametrize(
    ("marks", "operands", "expected"),
    [
        # 1: in, 2: body, 3: out
        ({1: mark("a", True), 3: mark("a", False)}, [(), (0,), (1,), (2,), (3,)], [0, 1, ("a", (2, 3)), 4]),
        # no result is marked, or none that comes from the operand
        ({1: mark("a", True)}, [(), (0,), (1,)], [0, 1, 2]),
        ({1: mark("a", True), 2: mark("a", False)}, [(), (0,), (0,), (1, 2)], [0, 1, 2, 3]),
        # 2 is needed outside too
        ({1: mark("a", True), 3: mark("a", False)}, [(), (0,), (1,), (2,), (2, 3)], [0, 1, 2, ("a", (2, 3)), 4]),
        # b inside of a
        (
            {1: mark("a", True), 2: mark("b", True), 4: mark("b", False), 5: mark("a", False)},
            [(), (0,), (1,), (2,), (3,), (4,)],
            [0, 1, ("a", (2, 3, 4, 5))],
        ),
        # the second operand of a needs a result of a
        (
            {1: mark("a", True), 2: mark("a", False), 3: mark("a", True, 1), 4: mark("a", False, 1)},
            [(), (0,), (1,), (2,), (3,)],
            [0, 1, 2, 3, 4],
        ),
        # each of a and b needs a result of the other
        (
            {
                **{1: mark("a", True), 2: mark("a", False), 7: mark("a", True, 1), 8: mark("a", False, 1)},
                **{3: mark("b", True), 4: mark("b", False), 5: mark("b", True, 1), 6: mark("b", False, 1)},
            },
            [(), (0,), (1,), (2,), (3,), (0,), (5,), (6,), (7,), (4, 8)],
            list(range(10)),
        ),
    ],
)
def test_regions(marks, operands, expected) -> None:
    last = len(operands) - 1
    assert order(plan(marks, operands, [last])) == expected
