"""Cutting: what a graph is, how it is numbered, written down and told from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from probes import cut_of, spy_on_barriers

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla._core.graph import graph, graph_text
from torch_xla._core.graph.graph import Edge, Input, Number
from torch_xla.ops.registry import Meta


def buffers(*shapes: tuple[int, ...], device: str = "xla") -> list[torch.Tensor]:
    """Tensors that hold computed values."""
    return [torch.ones(shape).to(device) for shape in shapes]


class TestDescription:
    def test_a_graph_that_is_computed_while_it_is_described_stays_as_it_was_cut(self) -> None:
        (x,) = buffers((3,))
        y = (x * 2 + 1).neg()
        cut = _bindings.Cut.of_device(0).graph()

        def node(*parts: object) -> object:  # as a signal handler may
            torch_xla.sync()
            return parts

        described = cut.describe_nodes((node, *graph.CLASSES[1:]))
        assert [parts[0] for parts in described] == ["aten.mul.Tensor", "aten.add.Tensor", "aten.neg.default"]
        assert [parts[2] for parts in described] == [(Edge(True, 0, 0),), (Edge(False, 0, 0),), (Edge(False, 1, 0),)]
        with pytest.raises(_bindings.StaleGraph):
            _bindings.OpByOpRun(cut, None)
        assert y.tolist() == [-3, -3, -3]

    def test_nodes_wiring_and_promises(self) -> None:
        x, y = buffers((2, 3), (3,))
        described = cut_of((x * 2.5 + y).sum(1))
        assert [node.op for node in described.nodes] == ["aten.mul.Tensor", "aten.add.Tensor", "aten.sum.dim_IntList"]
        mul, add, total = described.nodes
        assert mul.args == (Input(0), Number(0, 2.5, 1))
        assert mul.inputs == (Edge(leaf=True, slot=0, result=0),)
        assert add.args == (Input(0), Input(1), 1)
        assert add.inputs == (Edge(leaf=False, slot=0, result=0), Edge(leaf=True, slot=1, result=0))
        assert total.args == (Input(0), [1], False, None)
        assert total.outs == (Meta((2,), torch.float32),)
        assert described.leaves == (Meta((2, 3), torch.float32), Meta((3,), torch.float32))
        assert described.outputs == ((2, 0),)
        assert described.device == 0

    def test_a_node_with_several_results(self) -> None:
        (x,) = buffers((4, 5))
        values, indices = x.max(1)
        described = cut_of(indices + 1)
        top, add = described.nodes
        assert top.outs == (Meta((4,), torch.float32), Meta((4,), torch.int64))
        assert add.inputs == (Edge(leaf=False, slot=0, result=1),)
        assert values.shape == (4,)

    def test_recording_order_over_a_gap(self) -> None:
        (x,) = buffers((4,))
        early = x * 2.5
        for _ in range(100):
            x + 1  # recorded, and of no use
        late = early.exp()
        assert [node.op for node in cut_of(late * early).nodes] == [
            "aten.mul.Tensor",
            "aten.exp.default",
            "aten.mul.Tensor",
        ]

    def test_absent_indices_keep_their_place(self) -> None:
        (x,) = buffers((4, 5))
        index = torch.tensor([0, 2]).to("xla")
        (node,) = cut_of(torch.ops.aten.index.Tensor(x, [None, index])).nodes
        assert node.args == (Input(0), [None, Input(1)])

    def test_numbers_travel_by_type_and_order(self) -> None:
        (x,) = buffers((4,))
        y = (x * 2.5 + 3) * 4.5 - 7j
        floats, ints, complexes, _ = _bindings.Cut.of_tensors([y], _bindings.Cut.Scope.LIVE).graph().packed_numbers()
        assert floats.tolist() == [2.5, 4.5]
        assert ints.tolist() == [3]
        assert complexes.tolist() == [7j]

    def test_random_operators_bring_a_seed_in_two_words(self) -> None:
        torch_xla.manual_seed(41)
        x = torch.full((3,), 0.5).to("xla")
        y = torch.bernoulli(x) + torch.bernoulli(x)
        one, other = (node for node in cut_of(y).nodes if node.seeded)
        assert one.attrs == other.attrs
        *_, words = _bindings.Cut.of_tensors([y], _bindings.Cut.Scope.LIVE).graph().packed_numbers()
        assert words.tolist() == [0, 41, 0x9E3779B9, 0x7F4A7C15 + 41]

    def test_dead_values_are_not_computed(self) -> None:
        (x,) = buffers((4,))
        torch_xla.sync()
        x.sin()
        y = x.cos().tanh()
        cut = _bindings.Cut.of_device(0).graph()
        assert [node.op for node in graph.describe(cut).nodes] == ["aten.cos.default", "aten.tanh.default"]
        assert cut.outputs == [(1, 0)]
        assert y.shape == (4,)


class TestNumbering:
    def test_leaves_are_numbered_by_first_use(self) -> None:
        a, b, c = buffers((2,), (3,), (4,))
        described = cut_of(torch.cat([c * c, a, b * c[0]]))
        assert [meta.shape for meta in described.leaves] == [(4,), (3,), (2,)]

    def test_a_leaf_that_is_used_twice_is_one_input(self) -> None:
        (a,) = buffers((2,))
        described = cut_of(a * a + a)
        assert len(described.leaves) == 1
        assert all(edge.slot == 0 for node in described.nodes for edge in node.inputs if edge.leaf)

    def test_aliases_are_one_input(self) -> None:
        (a,) = buffers((2, 2))
        assert len(cut_of(a + a.detach() + a.data).leaves) == 1

    def test_nodes_are_in_recording_order_whatever_is_asked_first(self) -> None:
        (a,) = buffers((2,))
        x = a.sin()
        y = a.cos()
        assert cut_of(y, x) == cut_of(x, y)
        assert [node.op for node in cut_of(y, x).nodes] == ["aten.sin.default", "aten.cos.default"]

    def test_outputs_do_not_depend_on_the_age_of_their_tensors(self) -> None:
        def cut(shapes: list[tuple[int, ...]]) -> tuple[list[tuple[int, int]], str]:
            tensors = dict(zip(shapes, buffers(*shapes), strict=True))
            torch_xla.sync()
            tensors[(3,)].mul_(2.5)
            tensors[(2,)].add_(1.5)
            graph = _bindings.Cut.of_device(0).graph()
            return graph.outputs, graph.key

        older_first, younger_first = cut([(2,), (3,)]), cut([(3,), (2,)])
        assert older_first == younger_first
        assert older_first[0] == [(0, 0), (1, 0)]

    @pytest.mark.usefixtures("no_auto_barrier")
    def test_a_chain_of_a_hundred_thousand_nodes(self) -> None:
        (x,) = buffers((1,))
        for _ in range(100_000):
            x = x + 1
        assert _bindings.Cut.of_tensors([x]).preview().num_nodes == 100_000


class TestText:
    def test_one_node_a_line(self) -> None:
        x, y = buffers((2, 3), (3,))
        described = cut_of((x * 2.5 + y).max(1).values)
        line, _, function = str(described.nodes[0].frame).partition(" in ")
        at = f", at {line}"
        assert line.startswith(__file__) and function == "test_one_node_a_line"
        assert graph_text.text(described) == (
            f"IR {{  # {described.key} on xla:0\n"
            "  %c0 = prim::Constant(), value=1\n"
            "  %p0 = xla::device_data(), f32[2,3]\n"
            "  %p1 = xla::device_data(), f32[3]\n"
            f"  %0 = aten::mul.Tensor(%p0, number(2.5)), f32[2,3]{at}\n"
            f"  %1 = aten::add.Tensor(%0, %p1, %c0), f32[2,3]{at}\n"
            f"  %2 = aten::max.dim(%1, 1, False), f32[2], s64[2], ROOT=[0]{at}\n"
            "}\n"
        )

    def test_donated_inputs_and_second_results_are_marked(self) -> None:
        (x,) = buffers((2,))
        torch_xla.sync()
        x.mul_(2.5)
        cut = _bindings.Cut.of_device(0).graph()
        assert "  %p0 = xla::device_data(), f32[2], donated\n" in graph_text.text(graph.describe(cut))
        (y,) = buffers((2, 3))
        text = graph_text.text(cut_of(y.max(1).indices + 1))
        assert "aten::add.Tensor(%0.1, 1, %c0), s64[2]" in text

    def test_lists_and_absent_results(self) -> None:
        x, y = buffers((2,), (3,))
        assert "aten::cat([%p0, %p1], 0), f32[5]" in graph_text.text(cut_of(torch.cat([x, y])))

    def test_the_users_line_where_it_is_kept(self) -> None:
        (x,) = buffers((2,))
        y = x.sin()
        _bindings.set_frame_depth(0)
        try:
            z = y.cos()
        finally:
            _bindings.set_frame_depth(1)
        text = graph_text.text(cut_of(z))
        assert f"ROOT=[0], at {__file__}" not in text
        assert f"aten::sin(%p0), f32[2], at {__file__}:" in text
        # Not the function: what looks for a name in the text would find it there.
        assert "test_the_users_line_where_it_is_kept" not in text

    def test_dot(self) -> None:
        x, y = buffers((2, 3), (3,))
        assert graph_text.dot(cut_of((x + y).max(1).values)) == (
            "digraph G {\n"
            '  p0 [shape=box, label="input 0\\nf32[2,3]"];\n'
            '  p1 [shape=box, label="input 1\\nf32[3]"];\n'
            '  n0 [label="aten.add.Tensor\\nf32[2,3]"];\n'
            "  p0 -> n0;\n"
            "  p1 -> n0;\n"
            '  n1 [label="aten.max.dim\\nf32[2]\\ns64[2]"];\n'
            "  n0 -> n1;\n"
            "}\n"
        )

    @pytest.mark.compiled("it asks for a program's result")
    def test_showing_the_pending_graph_leaves_it_to_the_barrier(self) -> None:
        (x,) = buffers((50_000,))
        torch_xla.sync()
        y = x + 2.5
        assert "aten::add" in torch_xla._core.execute.export.graph_text([], "text")
        torch_xla.sync()
        assert _bindings.buffer_of(y) is not None


def key(*tensors: torch.Tensor) -> str:
    return _bindings.Cut.of_tensors(list(tensors)).preview().key


class TestKey:
    def test_it_is_the_same_at_every_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = torch.ones(3, device="xla").exp()
        torch_xla.sync()  # the first compile of a process learns what rules want, and cuts again
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2)).to("xla")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch_xla.sync()
        keys = spy_on_barriers(monkeypatch)
        for i in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 3)
            optimizer.zero_grad()
            model(torch.full((5, 4), float(i)).to("xla")).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
        assert len(keys) == 4 and kept.is_xla
        assert len(set(keys)) == 1

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            pytest.param(lambda x: x * 2.5, lambda x: x * -7.25, id="a number"),
            pytest.param(lambda x: x * 2, lambda x: x * 3, id="an integer"),
            pytest.param(lambda x: torch.add(x, x, alpha=2.5), lambda x: torch.add(x, x, alpha=3.5), id="alpha"),
            pytest.param(lambda x: x + torch.rand_like(x), lambda x: x + torch.rand_like(x), id="a draw"),
            pytest.param(lambda x: x.detach().sin(), lambda x: x.sin(), id="an alias"),
        ],
    )
    def test_it_ignores(self, one: Callable[..., torch.Tensor], other: Callable[..., torch.Tensor]) -> None:
        assert key(one(*buffers((4, 4)))) == key(other(*buffers((4, 4))))

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            pytest.param(lambda x: x.sin(), lambda x: x.cos(), id="the operator"),
            pytest.param(lambda x: x.sum(0), lambda x: x.sum(1), id="an attribute"),
            pytest.param(lambda x: x.sum(0), lambda x: x.sum(0, dtype=torch.float64), id="a dtype argument"),
            pytest.param(lambda x: x + x[:3, :3].sum(), lambda x: x[:3] + x[:3, :3].sum(), id="a shape"),
            pytest.param(lambda x: x * 2, lambda x: x * 2.0, id="the type of a number"),
            pytest.param(lambda x: x * 1, lambda x: x * 2, id="a special number"),
            pytest.param(lambda x: x * True, lambda x: x * 2, id="a boolean"),
            pytest.param(lambda x: x**2, lambda x: x**3, id="a number that shapes the program"),
            pytest.param(lambda x: x.sin() - x.cos(), lambda x: x.cos() - x.sin(), id="the order"),
            pytest.param(lambda x: x - x.sin(), lambda x: x.sin() - x, id="the wiring"),
            pytest.param(lambda x: x.max(1).values, lambda x: x.max(1).indices, id="which result is used"),
        ],
    )
    def test_it_tells_apart(self, one: Callable[..., torch.Tensor], other: Callable[..., torch.Tensor]) -> None:
        (x,) = buffers((4, 4))
        assert key(one(x)) != key(other(x))

    def test_it_tells_leaves_apart(self) -> None:
        (x, y), (z,) = buffers((4,), (4,)), buffers((4,))
        assert key(x * y) == key(y * z) != key(x * x)
        assert key(z.sin()) != key(z.double().to("cpu").to("xla").sin())
        assert key(buffers((5,))[0].sin()) != key(z.sin())

    def test_it_tells_outputs_apart(self) -> None:
        (x,) = buffers((4,))
        y = x.sin()
        z = y.cos()
        assert len({key(y), key(z), key(y, z)}) == 3

    def test_it_tells_donation_apart(self) -> None:
        def cut(kept: bool) -> tuple[str, list[int]]:
            (x,) = buffers((4,))
            torch_xla.sync()
            y = x.add(2.5) if kept else x.add_(2.5)
            graph = _bindings.Cut.of_device(0).graph()
            del y
            return graph.key, graph.donated

        assert cut(kept=False)[1] == [0]
        assert cut(kept=True)[1] == []
        assert cut(kept=False)[0] != cut(kept=True)[0]

    def test_it_tells_a_further_output_from_a_kept_buffer(self) -> None:
        def cut(kept: bool) -> _bindings.Graph:
            x, state = buffers((20_000,), (20_000,))
            torch_xla.sync()
            y = x * 2.5
            state.copy_(y + 1.5)
            if kept:  # two outputs, and nothing is said of donation
                return _bindings.Cut.of_tensors([state], _bindings.Cut.Scope.LIVE).graph()
            del y  # one output, and the only leaf is not donated
            return _bindings.Cut.of_device(0).graph()

        one, two = cut(kept=False), cut(kept=True)
        assert (one.num_outputs, two.num_outputs) == (1, 2)
        assert one.key != two.key

    def test_it_tells_devices_apart(self) -> None:
        (x,), (y,) = buffers((4,), device="xla:0"), buffers((4,), device="xla:1")
        assert key(x.sin()) != key(y.sin())
        assert cut_of(y.sin()).device == 1

    def test_all_numbers_are_inputs_if_asked(self) -> None:
        (x,) = buffers((4,))
        _bindings.set_special_numbers(False)
        try:
            assert key(x * 1) == key(x * 0) == key(x * 2)
        finally:
            _bindings.set_special_numbers(True)


def test_graphs_of_two_devices_do_not_mix() -> None:
    torch_xla.sync()
    (x,), (y,) = buffers((4,), device="xla:0"), buffers((5,), device="xla:1")
    kept = x.sin(), y.cos()
    assert [node.op for node in graph.describe(_bindings.Cut.of_device(0).graph()).nodes] == ["aten.sin.default"]
    assert [node.op for node in graph.describe(_bindings.Cut.of_device(1).graph()).nodes] == ["aten.cos.default"]
    del kept


def test_graphs_are_saved_where_a_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(5).to("xla")
    torch_xla.sync()
    cache.clear()
    path = tmp_path / "graphs"
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(path))
    for form, said in (("text", "aten::cosh"), ("dot", "digraph"), ("hlo", "HloModule")):
        monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", form)
        cache.clear()
        y = x.cosh()
        torch_xla.sync()
        assert said in path.read_text()
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path))
    for function in (torch.sinh, torch.tanh):
        y = function(x)
        torch_xla.sync()  # the values are there although the graph's text is not
        torch.testing.assert_close(y.cpu(), function(torch.ones(5)))
    (told,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[")]
    assert told.startswith(f"[graph] XLA_SAVE_TENSORS_FILE={str(tmp_path)!r}, which cannot be written")
