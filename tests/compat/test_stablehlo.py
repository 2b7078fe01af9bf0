"""Exported programs as StableHLO: called, saved, loaded."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from torch_xla import stablehlo
from torch_xla.stablehlo import StableHLOExportOptions, StableHLOGraphModule, exported_program_to_stablehlo


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.relu(self.norm(self.linear(x))) * 5 + self.table
        return {"y": y, "x": x - 2.5}


@pytest.fixture
def net() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return Net().eval(), (torch.randn(2, 3), torch.randn(1))


@pytest.fixture
def exported(net: tuple[torch.nn.Module, tuple[torch.Tensor, ...]]) -> torch.export.ExportedProgram:
    return torch.export.export(*net)


@pytest.mark.parametrize("inline", (True, False))
def test_same_values_as_the_model(net, exported, inline, tmp_path: Path) -> None:
    module, args = net
    expected = module(*args)
    program = exported_program_to_stablehlo(exported, StableHLOExportOptions(inline_all_constant=inline))
    program.save(tmp_path)
    for callable_ in (program, StableHLOGraphModule.load(tmp_path)):
        results = callable_(*args)
        assert results["y"].device.type == "xla"
        torch.testing.assert_close({k: v.cpu() for k, v in results.items()}, dict(expected))


def test_numbers_are_inputs_when_asked(exported) -> None:
    inlined = exported_program_to_stablehlo(exported).get_stablehlo_text()
    lifted = exported_program_to_stablehlo(exported, StableHLOExportOptions(inline_all_constant=False))
    assert "dense<5.0" in inlined or "dense<5>" in inlined
    assert "dense<5" not in lifted.get_stablehlo_text()
    assert [float(c) for c in lifted._bundle.additional_constants] == [5.0, 2.5]


def test_parameters_unused_inputs_and_files(net, exported, tmp_path: Path) -> None:
    stablehlo.save_as_stablehlo(exported, tmp_path)
    meta = StableHLOGraphModule.load(tmp_path)._bundle.stablehlo_funcs[0].meta
    names = [location.name for location in meta.input_locations if location.name]
    assert "linear.weight" in names and "norm.num_batches_tracked" not in names
    assert [location.position for location, _ in meta.unused_inputs] == [1]
    assert {p.name for p in (tmp_path / "functions").iterdir()} == {"forward.meta", "forward.bytecode", "forward.mlir"}
    stablehlo.save_torch_model_as_stablehlo(*net, tmp_path / "again")
    assert (tmp_path / "again" / "data" / "linear.weight").exists()


def test_without_weights_a_call_says_so(net, exported) -> None:
    program = exported_program_to_stablehlo(exported, StableHLOExportOptions(export_weights=False))
    with pytest.raises(KeyError, match="export_weights=True"):
        program(*net[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_another_dtype_is_refused(net, exported, dtype: torch.dtype) -> None:
    program = exported_program_to_stablehlo(exported)
    with pytest.raises(ValueError, match=rf"got {str(dtype)[6:]} for input \d+, expected float32; convert it"):
        program(net[1][0].to(dtype), net[1][1])


def test_parameters_with_names_like_numbers_and_paths(tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("0", torch.nn.Parameter(torch.tensor(7.0)))
            self.register_buffer("a/b", torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * getattr(self, "0") + 2.5 * x + getattr(self, "a/b")

    exported = torch.export.export(Scaled(), (torch.ones(3),))
    program = exported_program_to_stablehlo(exported, StableHLOExportOptions(inline_all_constant=False))
    program.save(tmp_path)
    for ours in (program, StableHLOGraphModule.load(tmp_path)):
        assert ours(torch.ones(3)).tolist() == [10.5] * 3


def test_what_a_model_writes_to_has_its_values_afterwards(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.norm = torch.nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            seen.mul_(2)
            return self.norm(x) + self.count + self.norm.running_mean

    module = Counting()
    program = exported_program_to_stablehlo(torch.export.export(module, (torch.randn(4, 2), torch.ones(2))))
    program.save(tmp_path)
    for ours in (program, StableHLOGraphModule.load(tmp_path)):
        model, given, expected = copy.deepcopy(module), torch.ones(2), torch.ones(2)
        for _ in range(3):
            x = torch.randn(4, 2)
            torch.testing.assert_close(ours(x, given).cpu(), model(x, expected))
            torch.testing.assert_close(given, expected)


def test_arguments_are_taken_by_their_names_and_structure() -> None:
    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor, by: int, *, plus: torch.Tensor, minus: torch.Tensor) -> torch.Tensor:
            return x * by + plus - minus * 2

    plus, minus = torch.ones(3), torch.full((3,), 4.0)
    exported = torch.export.export(Named(), (torch.ones(3), 3), {"plus": plus, "minus": minus})
    program = exported_program_to_stablehlo(exported)
    assert program(torch.ones(3), 3, minus=minus, plus=plus).tolist() == [-4.0] * 3
    with pytest.raises(ValueError, match="got 4 for argument 1, expected 3, which the model was exported with"):
        program(torch.ones(3), 4, minus=minus, plus=plus)
    for args, kwargs in (((torch.ones(3),), {"plus": plus, "minus": minus}), ((torch.ones(3), 3), {"plus": plus})):
        with pytest.raises(ValueError, match="got arguments of another structure"):
            program(*args, **kwargs)


def test_random_numbers_are_those_of_the_export() -> None:
    class Noise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + torch.rand_like(x), x + torch.rand_like(x)

    x = torch.zeros(64)
    program = exported_program_to_stablehlo(torch.export.export(Noise(), (x,)))
    first, second = program(x)
    assert first.min() >= 0 and first.max() < 1 and not torch.equal(first, second)
    assert torch.equal(first, program(x)[0])


def test_control_flow() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))

    program = exported_program_to_stablehlo(torch.export.export(Branch(), (torch.ones(3),)))
    assert program(torch.ones(3)).tolist() == [2, 2, 2]
    assert program(-torch.ones(3)).tolist() == [-2, -2, -2]


def test_host_operators_are_refused() -> None:
    class Host(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.geqrf(x)[0]

    exported = torch.export.export(Host(), (torch.eye(2),))
    with pytest.raises(NotImplementedError, match=re.escape("aten.geqrf.default")):
        exported_program_to_stablehlo(exported)


def test_unknown_options_are_refused(exported) -> None:
    with pytest.raises(NotImplementedError, match="export_node_metadata"):
        exported_program_to_stablehlo(exported, StableHLOExportOptions(export_node_metadata=True))


# Sizes that are left open ---------------------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """Layers whose lowering looks at sizes: a convolution, norms, softmax, attention's products, reshaping, slices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layer_norm = torch.nn.LayerNorm(16)
        self.linear = torch.nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.gelu(self.norm(self.conv(x)))
        z = self.layer_norm(y.flatten(2))
        scores = torch.softmax(z @ z.transpose(1, 2) / 4, -1)
        w = self.linear(scores @ z)
        return w.mean(0), w.reshape(-1, 5), torch.cat([w, w[:, :1]], 1), x.sum() + x.shape[0], w.select(0, 0).squeeze(0)


def opened(module: torch.nn.Module, example: tuple[torch.Tensor, ...], shapes: Any) -> StableHLOGraphModule:
    exported = torch.export.export(module.eval(), example, dynamic_shapes=shapes)
    return exported_program_to_stablehlo(exported)


def test_a_batch_of_any_size_is_saved_loaded_and_run_at_three(tmp_path: Path) -> None:
    batch = Dim("batch", min=2, max=100)
    module = Net().eval()
    program = opened(module, (torch.randn(5, 3), torch.randn(1)), ({0: batch}, None))
    assert "tensor<?x3xf32>" in program.get_stablehlo_text()
    program.save(tmp_path)
    loaded = StableHLOGraphModule.load(tmp_path)
    signature = loaded._bundle.stablehlo_funcs[0].meta.input_signature[-1]
    assert (signature.shape, signature.dynamic_dims) == ([5, 3], [0])
    for size in (2, 7, 64):
        args = torch.randn(size, 3), torch.randn(1)
        results = {name: value.cpu() for name, value in loaded(*args).items()}
        torch.testing.assert_close(results, dict(module(*args)))
    with pytest.raises(ValueError, match=r"got shape \[2, 4\] for input \d+, expected \[\?, 3\]"):
        loaded(torch.randn(2, 4), torch.randn(1))
    with pytest.raises(ValueError, match="<= 100"):
        loaded(torch.randn(101, 3), torch.randn(1))


def test_layers_of_any_size_have_the_cpus_values() -> None:
    module = Mixed().eval()
    program = opened(module, (torch.randn(3, 3, 4, 4),), ({0: Dim("batch", min=1, max=64)},))
    for size in (1, 2, 9):
        x = torch.randn(size, 3, 4, 4)
        for actual, expected in zip(program(x), module(x), strict=True):
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [None, ({0: Dim("rows", min=1, max=64)},)])
def test_dtypes_that_an_export_has_checked_are_no_operators(sizes: Any) -> None:
    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x != 1).to(torch.int32)

    x = torch.randint(3, (5, 4))
    exported = torch.export.export(Other(), (x,), dynamic_shapes=sizes)
    assert any("_assert_tensor_metadata" in str(node.target) for node in exported.graph.nodes)
    result = exported_program_to_stablehlo(exported)(x).cpu()
    assert result.dtype == torch.int32 and torch.equal(result, (x != 1).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_weights_of_types_that_numpy_does_not_have(dtype: torch.dtype, tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(-4.0, 4.0).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table.float()

    module, x = Scaled(), torch.randn(3, 8)
    exported_program_to_stablehlo(torch.export.export(module, (x,))).save(tmp_path)
    torch.testing.assert_close(StableHLOGraphModule.load(tmp_path)(x).cpu(), module(x))


@pytest.mark.parametrize("sizes", [None, ({0: Dim("batch", min=1, max=64)},)])
def test_attention_whose_result_is_viewed(sizes: Any) -> None:
    class Heads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.view(*part.shape[:2], 4, 8).transpose(1, 2) for part in x.split(32, -1))
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return seen.transpose(1, 2).reshape(*x.shape[:2], 32).contiguous().view(-1, 32)

    module, x = Heads(), torch.randn(3, 12, 96)
    program = exported_program_to_stablehlo(torch.export.export(module, (x,), dynamic_shapes=sizes))
    for batch in (x,) if sizes is None else (x, x[:1], torch.randn(7, 12, 96)):
        torch.testing.assert_close(program(batch).cpu(), module(batch), rtol=1e-4, atol=1e-5)


def test_two_sizes_and_numbers_as_inputs() -> None:
    class Outer(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x[:, None] * y[None, :] * 3.5).flatten()

    sizes = {0: Dim("rows", min=1, max=64)}, {0: Dim("columns", min=1, max=64)}
    exported = torch.export.export(Outer(), (torch.randn(3), torch.randn(4)), dynamic_shapes=sizes)
    program = exported_program_to_stablehlo(exported, StableHLOExportOptions(inline_all_constant=False))
    x, y = torch.randn(2), torch.randn(7)
    torch.testing.assert_close(program(x, y).cpu(), Outer()(x, y))


def test_operators_that_need_the_sizes_are_refused() -> None:
    class Grown(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.interpolate(x, scale_factor=2.0)

    with pytest.raises(NotImplementedError, match="whose lowering needs the sizes"):
        opened(Grown(), (torch.randn(3, 1, 4, 4),), ({0: Dim("batch", min=1, max=64)},))


def test_sizes_that_depend_on_values_are_refused() -> None:
    class Chosen(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0] * 2

    exported = torch.export.export(Chosen(), (torch.randn(5),))
    with pytest.raises(NotImplementedError, match="got size u0, which depends on values"):
        exported_program_to_stablehlo(exported)
