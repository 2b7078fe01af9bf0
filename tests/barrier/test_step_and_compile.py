"""Regions: what they separate, what they forbid, and how they act on eager mode."""

import re
import threading

import pytest
import torch

import torch_xla
import torch_xla.debug.metrics as met
from torch_xla import experimental
from torch_xla._core.execute import region
from torch_xla._errors import GraphLimitError


@pytest.fixture(autouse=True)
def nothing_pending():
    torch_xla.sync()
    yield
    experimental.eager_mode(False)
    torch_xla.sync()
    assert region.current() is None


def cos_sin(x):
    return torch.cos(torch.sin(x))


def test_three_ways_to_use_it():
    x = torch.linspace(0, 1, 5).to("xla")
    expected = cos_sin(x.cpu())

    @torch_xla.compile
    def plain(x):
        """Documented."""
        return cos_sin(x)

    @torch_xla.compile(full_graph=True)
    def with_options(x):
        return cos_sin(x)

    wrapped = torch_xla.compile(cos_sin, name="wave")
    with torch_xla.compile():
        inside = cos_sin(x)
    for result in (plain(x), with_options(x), wrapped(x), inside):
        torch.testing.assert_close(result.cpu(), expected)
    assert plain.__name__ == "plain" and plain.__doc__ == "Documented."


def test_methods_can_be_decorated():
    class Model:
        scale = 3

        @torch_xla.compile
        def run(self, x, *, bias=0):
            return x * self.scale + bias

    assert Model().run(torch.ones(2, device="xla"), bias=2).tolist() == [5, 5]


def test_a_compiled_module_is_still_a_module_to_its_users():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)).to("xla")
    compiled = torch_xla.compile(model)
    compiled.eval()
    assert not model.training
    x = torch.ones(1, 3, device="xla")
    torch.testing.assert_close(compiled(x).cpu(), model(x).cpu())
    assert list(compiled.state_dict()) == list(model.state_dict())
    compiled.label = "kept"
    assert model.label == "kept"


def test_the_region_is_dispatched_at_its_end_and_compiled_once(compiles):
    step = torch_xla.compile(cos_sin)
    x = torch.ones(4, device="xla")
    torch_xla.sync()
    with compiles(1):
        for _ in range(3):
            x = step(x)
            assert not torch_xla._bindings.has_pending(0)


def test_work_from_before_is_a_graph_of_its_own(compiles):
    step = torch_xla.compile(lambda x: x * 2 + 1)
    x = torch.arange(3.0).to("xla")
    step(x)
    with compiles(1):  # the addition; the step itself is known
        y = x + 5
        z = step(y)
    assert z.tolist() == [11, 13, 15]


def test_step_issues_a_barrier_before_and_after(counted):
    with counted("MarkStep", 2), torch_xla.step():
        y = torch.ones(3, device="xla") + 1
    assert y.tolist() == [2, 2, 2]


def test_an_error_inside_leaves_everything_in_order(counted):
    with counted("MarkStep", 2), pytest.raises(KeyError, match="mine"), torch_xla.step():
        y = torch.ones(3, device="xla") + 1
        raise KeyError("mine")
    assert y.tolist() == [2, 2, 2]
    experimental.eager_mode(True)
    with pytest.raises(ValueError), torch_xla.compile(full_graph=True):
        raise ValueError
    assert experimental.is_eager_mode()


@pytest.mark.parametrize("eager", [False, True])
def test_full_graph_raises_where_a_value_is_read(eager):
    experimental.eager_mode(eager)
    x = torch.ones(3, 3, device="xla")

    def branch(x):
        return torch.sin(x) if x[0, 0] > 0 else torch.cos(x)

    with pytest.raises(
        RuntimeError, match="Unexpected execution happens inside the compiled function, exiting.*branch"
    ):
        torch_xla.compile(branch, full_graph=True)(x)
    assert experimental.is_eager_mode() == eager
    torch.testing.assert_close(torch_xla.compile(branch)(x).cpu(), torch.ones(3, 3).sin())


def test_full_graph_raises_at_a_barrier_and_allows_one_outside():
    with pytest.raises(GraphLimitError, match="barrier"), torch_xla.compile(full_graph=True):
        y = torch.ones(3, device="xla") + 1
        torch_xla.sync()
    with torch_xla.compile(full_graph=True):
        y = torch.ones(3, device="xla") + 1
    assert y.tolist() == [2, 2, 2]


def test_eager_mode_is_off_inside_only():
    experimental.eager_mode(True)
    x = torch.ones(2, device="xla") * 3
    assert not torch_xla._bindings.has_pending(0)

    @torch_xla.compile
    def inside(x):
        assert not experimental.is_eager_mode()
        y = x + 1
        assert torch_xla._bindings.has_pending(0)
        return y

    assert inside(x).tolist() == [4, 4]
    assert experimental.is_eager_mode()
    with experimental.eager_mode_context(False) as before:
        assert before and not experimental.is_eager_mode()
    assert experimental.is_eager_mode()


def test_regions_nest():
    outer = torch_xla.compile(lambda x: inner(x) * 2, name="outer")
    inner = torch_xla.compile(lambda x: x + 1, name="inner", full_graph=True)
    assert outer(torch.ones(2, device="xla")).tolist() == [4, 4]


def test_graphs_are_named_after_the_region():
    names = []

    def note():
        names.append(region.name())

    def named(x):
        note()
        with torch_xla.compile():
            note()
        return x

    torch_xla.compile(named)(torch.ones(1, device="xla"))
    torch_xla.compile(named, name="other")(torch.ones(1, device="xla"))
    assert names == ["named", "named", "other", "other"]
    assert region.name() is None


class TestMaxDifferentGraphs:
    def run(self, f, *args, limit):
        return torch_xla.compile(f, max_different_graphs=limit)(*args)

    def test_the_same_graph_counts_once(self):
        def f(x):
            return x + x

        for _ in range(3):
            self.run(f, torch.rand(10, device="xla"), limit=1)

    def test_another_shape(self):
        def f(x):
            return x + x

        self.run(f, torch.rand(10).to("xla"), limit=1)
        with pytest.raises(RuntimeError) as caught:
            self.run(f, torch.rand(5).to("xla"), limit=1)
        known, _, differences = str(caught.value).partition("\nWhat differs from the nearest one:\n")
        assert re.search(r"input 0 went from float32\[10\] .* to float32\[5\], read by aten.add.Tensor", differences)
        assert known == (
            "[compile] Maximum number of different graphs allowed per function exceeded: 1\n"
            "Got: [] aten::add, xla_shape=f32[5]{0}, dynamic_dims: ()\n"
            "Expected: [] aten::add, xla_shape=f32[10]{0}, dynamic_dims: ()"
        )

    def test_several_ways_to_go_on(self):
        def f(x, way):
            r = x + x
            return r * 2 if way == 0 else r + x if way == 1 else r / 3 if way == 2 else r

        x = torch.rand(10).to("xla")
        for way in (0, 1, 0):
            self.run(f, x, way, limit=2)
        expected = (
            "Expected either of:\n"
            "  - [] aten::mul, xla_shape=f32[10]{0}, dynamic_dims: ()\n"
            "  - [] aten::add, xla_shape=f32[10]{0}, dynamic_dims: ()"
        )
        with pytest.raises(RuntimeError) as caught:
            self.run(f, x, 2, limit=2)
        assert "Got: [] aten::div" in str(caught.value) and expected in str(caught.value)
        with pytest.raises(RuntimeError) as caught:
            self.run(f, x, 3, limit=2)
        assert "Reached the end of the function at: [] aten::add" in str(caught.value)
        assert expected in str(caught.value)

    def test_functions_are_told_apart(self):
        x = torch.rand(10).to("xla")
        for number in range(3):
            self.run(lambda x, number=number: x + x if number else x * x, x, limit=1)

    def test_a_context_counts_for_itself(self):
        with torch_xla.compile(max_different_graphs=1):
            torch.rand(3).to("xla") + 1
        with torch_xla.compile(max_different_graphs=1):
            torch.rand(3).to("xla") * 2

    def test_nothing_is_lost_when_it_raises(self):
        def f(x):
            results.append(x + 1)

        results = []
        self.run(f, torch.ones(2).to("xla"), limit=1)
        with pytest.raises(GraphLimitError):
            self.run(f, torch.ones(3).to("xla"), limit=1)
        assert results[1].tolist() == [2, 2, 2]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"\[compile\] got int"):
        torch_xla.compile(3)
    with pytest.raises(ValueError, match="max_different_graphs=0.*1 or more"):
        torch_xla.compile(cos_sin, max_different_graphs=0)


def test_reading_a_value_does_not_break_an_ordinary_region():
    met.clear_all()
    with torch_xla.compile():
        x = torch.ones(3).to("xla") + 1
        assert x.sum().item() == 6
        y = x * 2
    assert y.tolist() == [4, 4, 4]


class TestThreads:
    """A region, and recording in eager mode, are a thread's own."""

    def test_another_thread_reads_inside_a_full_graph(self) -> None:
        y = torch.ones(3, device="xla") * 2
        read: list[float] = []
        with torch_xla.compile(full_graph=True):
            z = y * 3
            other = threading.Thread(target=lambda: read.append((torch.ones(2, device="xla") + 1).sum().item()))
            other.start()
            other.join()
        assert read == [4.0] and z.tolist() == [6.0] * 3

    def test_another_thread_stays_in_eager_mode(self) -> None:
        from torch_xla.experimental import eager

        modes: list[bool] = []
        with eager.eager_mode_context(True), torch_xla.compile():
            other = threading.Thread(target=lambda: modes.append(eager.is_eager_mode()))
            other.start()
            other.join()
            modes.append(eager.is_eager_mode())
        assert modes == [True, False] and not eager.is_eager_mode()
