"""Operators the device does not know: a host callback inside the graph, or a cut where shapes depend on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import cut_of, here, python
from torch import Tensor

import torch_xla
import torch_xla.debug.metrics as met
from torch_xla import _bindings, _notices
from torch_xla._core.compile import cache, compiler
from torch_xla._core.lower import lowering
from torch_xla.ops.call import way_of


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """No traced rule and no executable: what is counted at a first lowering is counted again."""
    torch_xla.sync()
    cache.clear()
    lowering._rules.clear()
    yield


def values(*shape: int) -> Tensor:
    """Values large enough in number that a read compiles them."""
    count = int(torch.tensor(shape).prod())
    return torch.linspace(0.1, 2, count).reshape(shape)


def computed(tensor: Tensor) -> Tensor:
    """The tensor's value by way of a compiled graph, whatever its size."""
    torch_xla.sync()
    return tensor.cpu()


def define(library: torch.library.Library) -> None:
    """Operators that nothing but a CPU kernel is known of."""

    def same_cpu(x: Tensor, more: list[Tensor], a: float, dims: list[int]) -> tuple[Tensor, Tensor]:
        return x + more[1], x.new_full(dims, a)

    library.define("same(Tensor x, Tensor[] more, Scalar a, int[] dims) -> (Tensor, Tensor)")
    library.impl("same", lambda x, more, a, dims: (torch.empty_like(x), x.new_empty(dims)), "Meta")
    library.impl("same", same_cpu, "CPU")
    library.define("made(Tensor x, *, Device? device=None) -> Tensor")
    library.impl("made", lambda x, device=None: torch.empty_like(x), "Meta")
    library.impl("made", lambda x, device=None: torch.ones(x.shape, device=device) + x, "CPU")
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", torch.empty_like, "Meta")
    library.impl("cube", lambda x: x**3, "CPU")
    library.define("write(Tensor(a!) x, float by) -> ()")
    library.impl("write", lambda x, by: None, "Meta")
    library.impl("write", lambda x, by: (x.add_(by), None)[1], "CPU")
    library.define("write_and_make(Tensor(a!) x, float by) -> Tensor")
    library.impl("write_and_make", lambda x, by: torch.empty_like(x), "Meta")
    library.impl("write_and_make", lambda x, by: x.add_(by) * 2, "CPU")

    def above_cpu(x: Tensor, least: float) -> Tensor:
        if x.dim() != 1:
            raise ValueError(f"expected a vector, got {x.dim()} dimensions")
        return (x >= least).nonzero().squeeze(1)

    library.define("above(Tensor x, float least) -> Tensor")
    library.impl("above", above_cpu, "CPU")


LIBRARY = torch.library.Library("fallback", "DEF")
define(LIBRARY)


@torch.library.register_fake("fallback::above", lib=LIBRARY)
def _above(x: Tensor, least: float) -> Tensor:
    """As torchvision's `nms`: how many there are depends on the values."""
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


ops = torch.ops.fallback


def segments(x: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", offsets=torch.tensor([0, 9, 36], device=x.device))


CALLBACKS: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("aten.special_airy_ai.default", torch.special.airy_ai),
    ("aten.special_bessel_y0.default", torch.special.bessel_y0),
    ("aten.special_bessel_y1.default", torch.special.bessel_y1),
    ("aten.special_modified_bessel_k1.default", torch.special.modified_bessel_k1),
    (
        "aten.segment_reduce.default",
        lambda x: torch.segment_reduce(x, "sum", offsets=torch.tensor([0, 9, 36], device=x.device)),
    ),
]


@pytest.mark.compiled("it is about programs that call the host")
class TestCallbacks:
    @pytest.mark.parametrize(("name", "program"), CALLBACKS, ids=[name.split(".")[1] for name, _ in CALLBACKS])
    def test_values_and_counter(self, name: str, program: Callable[[Tensor], Any], counted: Counting) -> None:
        assert way_of(name) == "callback", "this operator has a rule now; test another"
        x = values(36)
        with counted(f"aten::{name.split('.')[1]}", 1), counted("UncachedCompile", 1):
            ours = program(x.to("xla") + 0)
            torch_xla.sync()
        theirs = program(x + 0)
        for mine, expected in zip(*((r,) if isinstance(r, Tensor) else r for r in (ours, theirs)), strict=True):
            torch.testing.assert_close(mine.cpu(), expected)

    @pytest.mark.own_client("an operator of the host cuts the graph")
    def test_the_graph_stays_one(self, compiles: Counting) -> None:
        x = values(36)
        with compiles(1):
            y = (torch.special.airy_ai(x.to("xla") * 2) + 1).sum()
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), (torch.special.airy_ai(x * 2) + 1).sum())

    def test_later_steps_use_the_same_program_on_new_values(self, compiles: Counting) -> None:
        x = values(36).to("xla")
        with compiles(1):
            for i in range(3):
                y = torch.special.airy_ai(x + (i + 0.5))
                torch_xla.sync()
                torch.testing.assert_close(y.cpu(), torch.special.airy_ai(values(36) + (i + 0.5)))

    def test_the_report_names_it(self) -> None:
        computed(torch.special.airy_ai(values(36).to("xla")))
        assert "aten::special_airy_ai" in met.executed_fallback_ops()
        assert "aten::special_airy_ai" in met.short_metrics_report()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        x = (values(36) * 2).to(dtype)
        ours = computed(torch.special.airy_ai(x.to("xla")))
        torch.testing.assert_close(ours, torch.special.airy_ai(x))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.complex128])
    @pytest.mark.parametrize("shape", [(6,), (), (0, 4)])
    def test_dtypes_in_and_out(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = (values(*shape) * 3 if shape else torch.tensor(2.5)).to(dtype)
        ours = ops.same(x.to("xla"), [x.to("xla"), x.to("xla")], 1, [2, 3])
        torch_xla.sync()
        for mine, expected in zip(ours, ops.same(x, [x, x], 1, [2, 3]), strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.cpu(), expected)

    @pytest.mark.parametrize("scale", [2**40, 2.0**-300, 1j * 2.0**300], ids=["int64", "float64", "complex128"])
    def test_values_that_need_64_bits(self, scale: complex) -> None:
        wide = {int: torch.int64, float: torch.float64, complex: torch.complex128}[type(scale)]
        x = torch.arange(1, 4).to(wide) * scale
        (ours, _) = ops.same(x.to("xla"), [x.to("xla"), x.to("xla")], 1, [1])
        assert computed(ours).tolist() == (x + x).tolist()

    def test_a_device_argument_becomes_the_hosts(self) -> None:
        x = ops.made(values(6).to("xla"), device=torch.device("xla"))
        torch.testing.assert_close(computed(x), values(6) + 1)

    def test_an_operator_that_writes(self) -> None:
        x, y = values(6).to("xla"), values(6).to("xla")
        ops.write(x, 2.5)
        made = ops.write_and_make(y, 2.5)
        torch_xla.sync()
        torch.testing.assert_close(x.cpu(), values(6) + 2.5)
        torch.testing.assert_close(y.cpu(), values(6) + 2.5)
        torch.testing.assert_close(made.cpu(), (values(6) + 2.5) * 2)

    def test_an_operator_that_writes_and_is_computed_on_the_host(self) -> None:
        x = values(6).to("xla")
        ops.write_and_make(x, 2.5)
        torch.testing.assert_close(x.cpu(), values(6) + 2.5)

    def test_large_values(self) -> None:
        x = values(1500, 1500)
        ours = ops.cube(x.to("xla") @ torch.eye(1500).to("xla"))
        torch.testing.assert_close(computed(ours), x**3)

    def test_gradients(self) -> None:
        def program(device: str) -> Tensor:
            x = values(36).to(device).requires_grad_()
            offsets = torch.tensor([0, 9, 36], device=device)
            torch.segment_reduce(x * 2, "mean", offsets=offsets).sin().sum().backward()
            torch_xla.sync()
            assert x.grad is not None
            return x.grad.cpu()

        torch.testing.assert_close(program("xla"), program("cpu"))

    def test_gradients_of_an_operator_of_the_user(self) -> None:
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return ops.cube(x)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                return grad * 3 * x**2

        x = values(6).to("xla").requires_grad_()
        Cube.apply(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(computed(x.grad), 3 * values(6) ** 2)

    @pytest.mark.own_client("programs call the host")
    def test_in_a_loop_with_a_wait_for_each_run(self) -> None:
        x = values(36).to("xla")
        assert compiler.lower(cut_of(torch.special.airy_ai(x)), "graph").has_callback
        for _ in range(5):
            x = torch.special.airy_ai(x)
            torch_xla.sync()
            assert _bindings.buffer_of(x).is_ready()


class TestCuts:
    @pytest.mark.parametrize(
        ("name", "program"),
        [
            ("_unique2", lambda x: torch.unique(x)),
            ("unique_dim", lambda x: torch.unique(x, dim=0)),
            ("unique_consecutive", lambda x: torch.unique_consecutive(x)),
            ("bincount", lambda x: torch.bincount(x.flatten().long())),
            ("repeat_interleave", lambda x: torch.repeat_interleave(x.flatten().long())),
        ],
    )
    def test_values_and_counter(self, name: str, program: Callable[[Tensor], Tensor], counted: Counting) -> None:
        x = torch.tensor([[0.0, 3.0, 1.0], [4.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
        with counted(f"aten::{name}", 1):
            ours = program(x.to("xla") * 1.0)
        expected = program(x * 1.0)
        assert ours.device == torch.device("xla:0")
        torch.testing.assert_close(ours.cpu(), expected)

    def test_an_operator_whose_shapes_pytorch_cannot_tell(self, counted: Counting) -> None:
        with counted("aten::geqrf", 1):
            ours = torch.geqrf(values(6, 6).to("xla"))
        for mine, expected in zip(ours, torch.geqrf(values(6, 6)), strict=True):
            torch.testing.assert_close(mine.cpu(), expected)

    def test_the_rest_of_the_graph_stays_pending(self, compiles: Counting) -> None:
        x = values(40_000).to("xla")
        y = x.cos()
        with compiles(1):
            result = (x * 2 > 4 - 1e-4).nonzero()
        assert _bindings.buffer_of(y) is None
        with compiles(1):
            z = y[result[:, 0]] + 1
            torch_xla.sync()
        cpu = values(40_000)
        torch.testing.assert_close(z.cpu(), cpu.cos()[(cpu * 2 > 4 - 1e-4).nonzero()[:, 0]] + 1)

    def test_gradients_through_a_selection(self) -> None:
        def program(device: str) -> Tensor:
            x = values(4, 5).to(device).requires_grad_()
            (x[x > 1] ** 2).sum().backward()
            x.masked_select(x < 0.5).sum().backward()
            assert x.grad is not None
            return x.grad.cpu()

        torch.testing.assert_close(program("xla"), program("cpu"))

    def test_writing_through_a_mask_needs_no_cut(self, counted: Counting, compiles: Counting) -> None:
        x, y = values(4, 5), values(4, 5).to("xla")
        x[x > 1] = 7.5
        with compiles(1):
            y[y > 1] = 7.5
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), x)

    def test_tensors_of_different_sizes_differ_unread(self, compiles: Counting, counted: Counting) -> None:
        x = values(8, 8).to("xla")
        with compiles(0), counted("aten::equal", 0):
            assert not torch.equal(x @ x, x[:4])
        with counted("aten::equal", 1):
            assert torch.equal(x + 0, x)

    def test_nothing_is_found(self) -> None:
        x = torch.zeros(3, 4).to("xla")
        assert x.nonzero().shape == (0, 2)
        assert x[x > 0].shape == (0,)


class TestAFakeKernelWithADynamicSize:
    def test_the_result_has_the_size_that_the_values_give(self) -> None:
        host = values(36)
        x = host.to("xla") * 1
        for least in (0.5, 1.7, 9.0, 0.0):
            result = ops.above(x, least)
            assert result.shape == ops.above(host, least).shape
            assert result.tolist() == ops.above(host, least).tolist()
        assert "fallback::above" in met.executed_fallback_ops()

    def test_a_mistake_is_told_at_the_call(self) -> None:
        with pytest.raises(ValueError, match="expected a vector, got 2 dimensions"):
            ops.above(values(6, 6).to("xla"), 1.0)
        assert ops.above(values(6).to("xla"), 9.0).shape == (0,)


def test_an_operator_that_is_defined_again() -> None:
    program = """
import torch, torch_xla
x = torch.ones(3).to("xla")
for extra in ("", ", int[] z=[]", ", Tensor? w=None"):
    with torch.library._scoped_library("again", "DEF") as library:
        library.define(f"f(Tensor x{extra}) -> Tensor")
        library.impl("f", lambda x, *rest: torch.empty_like(x), "Meta")
        library.impl("f", lambda x, *rest: x + 1, "CPU")
        assert torch.ops.again.f(x).tolist() == [2.0] * 3
    with torch.library._scoped_library("again", "DEF") as library:
        library.define(f"g(Tensor x, Tensor y{extra}) -> Tensor")
        library.impl("g", lambda x, y, *rest: torch.empty_like(x), "Meta")
        library.impl("g", lambda x, y, *rest: x + y, "CPU")
        assert torch.ops.again.g(x, x).tolist() == [2.0] * 3
"""
    python("-c", program, imported=True)


@pytest.mark.usefixtures("all_told")
class TestReport:
    """What runs on the host is told once, with the user's line."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        _notices.forget("fallback")
        cache.clear()

    @pytest.mark.compiled("it is about programs that call the host")
    @pytest.mark.own_client("programs call the host")
    def test_inside_a_program(self, capfd: pytest.CaptureFixture[str]) -> None:
        for size in (5, 7):
            y = torch.special.airy_ai(values(size).to("xla"))
            line = here(-1)
            torch_xla.sync()
            assert y.shape == (size,)
        (told,) = [line for line in capfd.readouterr().err.splitlines() if "runs on the host" in line]
        text = "torch_xla: aten::special_airy_ai runs on the host, inside the program: it has no lowering rule"
        assert told == f"{text} ({line})"

    def test_between_two_programs(self, capfd: pytest.CaptureFixture[str]) -> None:
        x = values(6).to("xla")
        for _ in range(2):
            torch.unique(x)
        line = here(-1)
        (told,) = [line for line in capfd.readouterr().err.splitlines() if "runs on the host" in line]
        text = "torch_xla: aten::_unique2 runs on the host, between two programs: its result depends on the values"
        assert told == f"{text} ({line})"


@pytest.mark.parametrize("kind", ["Generator g", "Generator? g=None", "Generator[] g"])
def test_an_operator_of_ones_own_draws_from_its_generator(kind: str, counted: Counting) -> None:
    with torch.library._scoped_library("draws", "FRAGMENT") as library:
        library.define(f"noise(Tensor x, {kind}) -> Tensor")

        def noise(x: Tensor, g: Any = None) -> Tensor:
            return x + torch.rand(x.shape, generator=g[0] if isinstance(g, list) else g)

        library.impl("noise", noise, "CPU")
        library.impl("noise", lambda x, g=None: torch.empty_like(x), "Meta")

        def draws(device: str) -> list[Tensor]:
            x, result = torch.zeros(40, device=device), []
            for seed in (1, 2):
                generator = torch.Generator().manual_seed(seed)
                given = [generator] if "[]" in kind else generator
                result += [torch.ops.draws.noise(x, given).cpu() for _ in range(2)]
            return result

        with counted("draws::noise", 4):
            ours = draws("xla")
        for mine, theirs in zip(ours, draws("cpu"), strict=True):
            assert torch.equal(mine, theirs)
