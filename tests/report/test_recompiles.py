"""Why a graph is compiled again: what is told, where, how often, and as data."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from probes import cut_of

import torch_xla
from torch_xla._core.compile import cache
from torch_xla._core.report import recompiles as core
from torch_xla.debug import retrace
from torch_xla.ops import precision

pytestmark = [pytest.mark.compiled("it is about what is compiled again"), pytest.mark.usefixtures("all_told")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gc.collect()  # what a caught exception of another test still holds would be part of the first graph
    torch_xla.sync()
    cache.clear()
    retrace.clear()
    yield
    retrace.clear()


def line_of(text: str) -> str:
    """``file:line`` of the only line of this file that contains a text."""
    with open(__file__) as file:
        (number,) = [n for n, line in enumerate(file, 1) if f"# {text}\n" in line]
    return f"{__file__}:{number} in "


def run(step: Callable[[], torch.Tensor]) -> torch.Tensor:
    result = step()
    torch_xla.sync()  # the barrier
    return result


def only() -> retrace.Retrace:
    (result,) = retrace.records()
    return result


def test_a_first_graph_and_known_graphs_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        run(lambda: torch.ones(3, device="xla").sin())
    assert not retrace.records()
    assert capfd.readouterr().err == ""


def test_another_device_has_programs_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    for device in ("xla:0", "xla:1"):
        run(lambda device=device: torch.ones(3, device=device).sin())
    assert not retrace.records()
    assert capfd.readouterr().err == ""


def test_what_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in (None, "high"):
        monkeypatch.setattr(precision, "_chosen", level)
        run(lambda: torch.ones(3, device="xla").sin())
    assert only().reason.startswith("nothing that is recorded: a setting of PyTorch or XLA changed")


def test_an_input_of_another_shape(capfd: pytest.CaptureFixture[str]) -> None:
    for rows in (4, 5):
        x = torch.ones(rows, 3).to("xla")  # the batch
        run(lambda x=x: x.sin().sum())
    (difference,) = (d for d in only().differences if d.kind == "input")
    assert difference.text == "input 0 went from float32[4, 3] to float32[5, 3], read by aten.sin"
    assert difference.frame is not None and difference.frame.startswith(line_of("the batch"))
    assert only().line.startswith(line_of("the barrier"))
    (told,) = capfd.readouterr().err.splitlines()
    assert told == f"torch_xla: {only()}"
    assert line_of("the batch") in told and line_of("the barrier") in told


def test_a_constant() -> None:
    x = torch.ones(4, 4).to("xla")
    for dim in (0, 1):
        run(lambda dim=dim: x.cumsum(dim))  # the sum
    (difference,) = only().differences
    assert (difference.kind, difference.text) == ("constant", "argument 1 of aten.cumsum went from 0 to 1")
    assert difference.frame is not None and difference.frame.startswith(line_of("the sum"))


def test_a_number_that_becomes_an_input() -> None:
    x = torch.ones(4, dtype=torch.int64).to("xla")
    for number in (0, 1, 2, 3):
        run(lambda number=number: x + number)
    (difference,) = only().differences
    assert difference.text.endswith("went from 0 to 1; it is an input of the program from now on")


def test_a_number_of_another_type() -> None:
    x = torch.ones(4).to("xla")
    for number in (2, 2.5):
        run(lambda number=number: x.clamp(min=number))
    (difference,) = only().differences
    assert difference.text == "argument 1 of aten.clamp went from 2 (int) to 2.5 (float)"


def test_other_numbers_of_tensors() -> None:
    x, i = torch.ones(4, 4).to("xla"), torch.tensor([0, 1]).to("xla")
    for index in ((i,), (slice(None), i), (i, i)):
        run(lambda index=index: (x * x)[index])
    for count in (2, 3):
        run(lambda count=count: torch.cat([x] * count))
    told = [actual.differences[0].text.split("went ")[1] for actual in retrace.records()]
    assert told == ["from [a tensor] to [None, a tensor]", "from [None, a tensor] to 2 tensors"] + [
        "from 2 tensors to 3 tensors"
    ]


def test_an_input_that_another_line_made() -> None:
    def first() -> torch.Tensor:
        return torch.ones(3).to("xla")  # the first batch

    def second() -> torch.Tensor:
        return torch.ones(5).to("xla")  # the second batch

    for batch in (first, second):
        run(lambda batch=batch: batch().sin())
    difference = only().differences[0]
    assert f"from float32[3] (made at {line_of('the first batch')}first) to float32[5]" in difference.text
    assert difference.frame == f"{line_of('the second batch')}second"


def test_one_tensor_where_there_are_two_now() -> None:
    x, y = (torch.ones(100_000).to("xla") for _ in range(2))
    for other in (x, y):
        run(lambda other=other: x.sin() + other.cos())
    (difference,) = only().differences
    text = "2 inputs instead of 1: what was one tensor in two places is two tensors now"
    assert (difference.kind, difference.text) == ("input", text)


def test_layers_that_are_skipped_here_and_there() -> None:
    x = torch.ones(4).to("xla")
    for skipped in ((), (2, 5)):

        def step(skipped: tuple[int, ...] = skipped) -> torch.Tensor:
            y = x
            for layer in range(8):
                if layer not in skipped:
                    y = (y.sin().relu() if layer in (2, 5) else y.cos().exp()).neg() * y
            return y

        run(step)
    assert {difference.kind for difference in only().differences} == {"removed"}


def test_operators_that_come_and_go() -> None:
    x = torch.ones(4).to("xla")

    def step(extra: bool) -> torch.Tensor:
        y = x.sin().cos().exp()
        if extra:
            y = y.tanh()  # the extra one
        return y.neg().abs()

    for extra in (False, True, False, True):
        run(lambda extra=extra: step(extra))
    (difference,) = only().differences
    assert (difference.kind, difference.text) == ("inserted", "aten.tanh recorded anew")
    assert difference.frame is not None and difference.frame.startswith(line_of("the extra one"))


def test_other_results_are_kept() -> None:
    x = torch.ones(4).to("xla")
    kept = []
    for keep in (False, True):
        y = x.sin()
        kept.append(y if keep else None)
        z = y.cos()
        del y
        run(lambda z=z: z)
    (difference,) = only().differences
    assert difference.text == "the result of aten.sin is kept over the barrier, before it was not"


def test_an_old_value_that_is_still_held() -> None:
    x = torch.ones(100_000).to("xla")  # the old value
    graph = cut_of(x.sin())
    (difference,) = core.compare(graph, dataclasses.replace(graph, donated=(0,)))
    text = "the old value of input 0, float32[100000], is still held by another tensor, before it was not"
    assert (difference.kind, difference.text) == ("donation", text)
    assert difference.frame is not None and difference.frame.startswith(line_of("the old value"))


def test_different_programs_of_one_line_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(4, 4).to("xla")
    for step in (lambda: x.sin().cos().exp(), lambda: (x @ x).relu().sum().sqrt().neg()):
        run(step)
    assert not retrace.records() and capfd.readouterr().err == ""


def test_the_report_thins_out(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in range(1, 13):
        run(lambda rows=rows: torch.ones(rows).to("xla").sin())
    assert [actual.count for actual in retrace.records()] == list(range(2, 13))
    assert len(capfd.readouterr().err.splitlines()) == 4  # the first three and the tenth
    monkeypatch.setenv("XLA_NOTICES", "none")
    for rows in range(20, 22):
        torch.ones(rows).to("xla").sin()
        torch_xla.sync()
    assert capfd.readouterr().err == ""


def test_no_new_graphs() -> None:
    def step(rows: int) -> torch.Tensor:
        y = torch.ones(rows).to("xla").sin()
        torch_xla.sync()
        return y

    step(3)
    with torch_xla.debug.no_new_graphs():
        step(3)
    with torch_xla.debug.no_new_graphs():  # the guard
        y = torch.ones(5).to("xla").sin()
        with pytest.raises(RuntimeError, match=r"^\[retrace\] .*expected no new graph since") as info:
            torch_xla.sync()
    assert line_of("the guard") in str(info.value)
    # What was recorded is still there.
    torch.testing.assert_close(y.cpu(), torch.ones(5).sin())
    step(7)


def test_new_graphs_that_are_expected_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with torch_xla.debug.new_graphs_expected():
        for rows in (3, 4, 5):
            run(lambda rows=rows: torch.ones(rows).to("xla").sin())
    assert [actual.count for actual in retrace.records()] == [2, 3] and capfd.readouterr().err == ""
    run(lambda: torch.ones(6).to("xla").sin())
    assert "compiling a graph again" in capfd.readouterr().err


def test_a_limit_says_what_differs() -> None:
    double = torch_xla.compile(lambda x: x * 2, max_different_graphs=1)
    double(torch.ones(3).to("xla"))
    with pytest.raises(RuntimeError, match=r"input 0 went from float32\[3\] \(made at .*\) to float32\[4\]"):
        double(torch.ones(4).to("xla"))


def test_a_full_graph_says_who_read() -> None:
    @torch_xla.compile(full_graph=True)
    def read(x: torch.Tensor) -> float:
        return float((x * 2).sum())  # the read

    with pytest.raises(RuntimeError) as info:
        read(torch.ones(3).to("xla"))
    assert line_of("the read") in str(info.value)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_NODES", 4)
    for name in ("sin", "cos", "exp"):
        source = f"getattr(x, {name!r})()\n" + "sync()"
        x = torch.ones(3).to("xla").neg()
        exec(compile(source, f"<line {name}>", "exec"), {"x": x, "sync": torch_xla.sync})
    assert len(core._lines) <= 2
