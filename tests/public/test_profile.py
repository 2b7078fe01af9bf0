"""What a profile accounts for: on made-up events, whose times are known, and on small programs, by counts and lines."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from probes import here
from torch import nn
from torch.nn.modules import module as torch_module

import torch_xla
from torch_xla import _events
from torch_xla._core.compile import cache
from torch_xla._core.report import recompiles
from torch_xla._events import Launch
from torch_xla.debug._profile import account, page, report, words
from torch_xla.debug._profile.collect import Collector, Finished, Mark, Sample, Span

STATS = SimpleNamespace(
    argument_size_in_bytes=100, output_size_in_bytes=50, alias_size_in_bytes=30, temp_size_in_bytes=7
)


class Events:
    """Builds what a profile collects, on a clock of its own that starts at 100."""

    def __init__(self) -> None:
        self.made = Collector()
        self.made.start = 100.0
        self.made.counts = [(100.0, {})]

    def span(self, stage: str, start: float, end: float, detail: object = None, thread: int | None = None) -> None:
        self.made.spans.append(Span(stage, 100 + start, 100 + end, thread or self.made.owner, detail))

    def run(self, start: float, end: float, key: str = "k") -> None:
        launch = Launch(0, key, 100 + start, None, None)
        self.made.finished.append(Finished(launch, self.made.owner, 100 + end))
        self.made.stats[key] = SimpleNamespace(get_compiled_memory_stats=lambda: STATS)

    def mark(self, kind: str, time: float, *detail: object) -> None:
        self.made.marks.append(Mark(kind, 100 + time, self.made.owner, detail))

    def report(self, end: float) -> report.Report:
        self.made.end = 100 + end
        return account.report(self.made)


def test_what_packs_values_is_compiled_on_the_host():
    events = two_steps()
    events.span("packing", 28.2, 28.7)  # while the second program is started
    result = events.report(40)
    assert result.runs[1].start == pytest.approx(28.7)
    assert result.steps[1].stages["compile"] == pytest.approx(0.5) and result.steps[1].compiles == 0
    assert words.warm(result) == []


def test_a_graph_that_ran_without_a_program_is_a_run_of_its_line():
    events = Events()
    for start in (1, 5):
        events.span("barrier", start, start + 3, ("sync", "train.py:9 in <module>"))
        events.span("operators", start + 0.5, start + 2.5, (0, "train.py:9 in <module>"))
    result = events.report(9)
    assert [(run.key, run.seconds) for run in result.runs] == [(report.UNCOMPILED, 2.0)] * 2
    assert [step.stages["operators"] for step in result.steps if step.ended] == [2.0, 2.0]
    text = "2 new graphs ran operator by operator at train.py:9 in <module>, 4.00 s"
    assert ("operators", text) in words.findings(result)


def test_nested_spans_are_cut_into_pieces():
    spans = [Span("a", 0, 10, 1, None), Span("b", 2, 8, 1, None), Span("c", 3, 4, 1, None), Span("d", 12, 13, 1, None)]
    pieces = [(start, end, "".join(s.stage for s in cover)) for start, end, cover in account.innermost(spans)]
    assert pieces == [(0, 2, "a"), (2, 3, "ab"), (3, 4, "abc"), (4, 8, "ab"), (8, 10, "a"), (12, 13, "d")]


def test_overlaps_are_complete():
    left = [account._Piece(0, 4, "a"), account._Piece(4, 6, "b")]
    right = [account._Piece(1, 2, 1), account._Piece(3, 5, 2), account._Piece(7, 8, 3)]
    results = [(a.value, b.value, both) for a, b, both in account.overlaps(left, right)]
    assert results == [("a", 1, 1), ("a", 2, 1), ("b", 2, 1)]


def two_steps() -> Events:
    """A step that compiles, and one in which a value is read; a second on the clock is a second of the host."""
    events = Events()
    for at in (0, 20):
        events.span("barrier", at + 2, at + 9, ("user torch_xla.sync", "train.py:9 in step"))
        events.span("cut", at + 2, at + 3)
        events.span("look up", at + 3, at + 4)
        events.span("ExecuteTime", at + 8, at + 9)
    events.span("LoweringTime", 4, 5)
    events.span("CompileTime", 5, 8)
    events.mark("compile", 5, "k", 12, "train.py:9 in step", None, None, 0, ())
    events.run(8, 12)
    events.run(28, 33)
    events.span("read", 30, 34, "train.py:11 in step")
    events.span("TransferFromDeviceTime", 31, 34)
    return events


def test_a_step_is_shared_out_among_the_stages():
    result = two_steps().report(40)
    first, second, rest = result.steps
    assert first.stages == {"record": 2, "cut": 1, "look up": 1, "lower": 1, "compile": 3, "start": 1}
    assert (first.seconds, first.execute, first.idle, first.compiles, first.ended) == (9, 1, 8, 1, True)
    # Between the first barrier and the second: 13 s of Python, 4 s in the barrier that no stage explains.
    assert second.stages == {"record": 13, "cut": 1, "look up": 1, "start": 5}
    assert (second.execute, second.idle, second.compiles) == (4, 16, 0)
    # The read waits for the program until 33, and copies until 34.
    assert rest.stages == pytest.approx({"record": 7, "transfer": 1, "wait": 3}) and not rest.ended
    for step in result.steps:
        assert sum(step.stages.values()) == pytest.approx(step.seconds) == pytest.approx(step.execute + step.idle)


def test_a_program_is_over_when_the_host_has_its_results():
    events = Events()
    events.span("read", 1, 5, "train.py:11 in step")
    events.run(2, 7)  # noted late
    events.span("wait", 13, 15, "train.py:12 in step")
    events.run(12, 18)
    assert [(run.start, run.end) for run in events.report(20).runs] == [(2, 5), (12, 15)]


def test_segments_leave_no_hole():
    result = two_steps().report(40)
    assert result.host[0].start == 0 and result.host[-1].end == 40
    assert all(a.end == b.start for a, b in zip(result.host, result.host[1:], strict=False))


def test_gaps_are_named_by_what_the_host_did():
    events = two_steps()
    events.run(37, 38)
    events.span("loader", 38, 50)
    events.run(50, 51)
    result = events.report(60)
    assert [(g.start, g.seconds, g.stage, g.name) for g in result.gaps] == [
        (0, 8, "compile", "compiling a graph at train.py:9 in step"),
        (12, 16, "record", "recording"),
        (33, 4, "record", "recording after a value was read at train.py:11 in step"),
        (38, 12, "loader", "the data loader"),
        (51, 9, "record", "the end of the block"),
    ]
    assert result.waits()[0] == ("recording", 1, 16)


def test_a_read_at_the_line_of_an_operator_on_the_host_is_its():
    events = Events()
    for at in (0, 10):
        events.mark("fallback", at + 1, "aten::nonzero", "between two programs: why", "train.py:7 in step")
        events.span("read", at + 2, at + 5, "train.py:7 in step")
        events.run(at + 2, at + 4)
    events.span("read", 16, 18, "train.py:8 in step")
    result = events.report(20)
    assert result.fallbacks == (
        report.Fallback("aten::nonzero", "between two programs: why", "train.py:7 in step", 2, 6.0),
    )
    assert result.reads == (report.Read("train.py:8 in step", 1, 2.0),)
    assert result.gaps[1].name == "recording after aten::nonzero ran on the host at train.py:7 in step"


def test_a_plain_data_loader_is_known_by_its_frames():
    events = Events()
    events.made.samples = [Sample(100 + t, "train.py:5 in read", 2 <= t <= 6) for t in range(10)]
    events.run(0, 1)
    events.run(8, 9)
    result = events.report(10)
    assert [gap.name for gap in result.gaps] == ["the data loader", "the end of the block"]
    assert result.lines[0].stages == {"loader": 5, "record": 5}


def test_barriers_without_work_end_no_step():
    events = two_steps()
    for at in (9.5, 10.5, 35):
        events.span("barrier", at, at + 0.1, ("user torch_xla.sync", "train.py:9 in step"))
    assert [step.start for step in events.report(40).steps] == [0, 9, 29]


def test_step_traces_are_the_steps_where_there_are_some():
    events = two_steps()
    cause = "torch_xla.sync when exiting a profiler StepTrace region"
    events.span("barrier", 35, 36, (cause, "train.py:20 in <module>"))
    assert [step.start for step in events.report(40).steps] == [0, 36]


def test_what_a_program_needs():
    result = two_steps().report(40).programs
    assert result == (report.ProgramProfile("k", None, "train.py:9 in step", 2, 9.0, 100, 20, 7, 127),)


def test_threads_beside_the_profiled_one():
    events = two_steps()
    events.made.names.update({1: "torch_xla-loader-copy-xla:0", 2: ""})
    events.span("TransferToDeviceTime", 1, 3, thread=1)
    events.span("TransferToDeviceTime", 21, 21.5, thread=2)  # PyTorch's backward thread, which the host waits for
    result = events.report(40)
    assert {name: [(s.stage, s.seconds) for s in rows] for name, rows in result.others.items()} == {
        "loader-copy-xla:0": [("transfer", 2)]
    }
    assert result.steps[1].stages["transfer"] == 0.5


def train(steps: int) -> tuple[torch_xla.debug.profile, dict[str, str]]:
    """A loop with a ragged batch, a read, an operator on the host, and results that are kept."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).to("xla")
    kept, lines = [], {}
    with torch_xla.debug.profile() as profiled:
        for i in range(steps):
            loss = model(torch.ones(3 if i == steps - 1 else 4, 8).to("xla")).sum()
            kept.append(loss * 2)
            lines["made"] = here(-1)
            torch_xla.sync()
            lines["barrier"] = here(-1)
            assert loss.item() < 1e9
            lines["read"] = here(-1)
    torch.unique(kept[0])
    return profiled, lines


@pytest.fixture
def trained() -> tuple[torch_xla.debug.profile, dict[str, str]]:
    for known in (cache, recompiles):
        known.clear()
    return train(9)


@pytest.mark.compiled("it is about what is compiled again")
def test_lines_of_a_real_loop(trained):
    profiled, lines = trained
    result = profiled.report
    assert [step.ended for step in result.steps] == [True] * 9 + [False]
    assert [c.line for c in result.compiles if c.again] == [lines["barrier"]]
    (again,) = [c for c in result.compiles if c.again]
    assert "float32[4, 8] to float32[3, 8]" in again.reason and again.cause == "user torch_xla.sync"
    assert [(read.line, read.count) for read in result.reads] == [(lines["read"], 9)]
    # The kept results, and what their graphs save for the backward pass.
    growing = [(g.kind, g.line, g.after - g.before) for g in result.memory.growth if g.growing]
    assert ("float32[]", lines["made"], 9) in growing
    assert len(result.runs) == 9 and {run.line for run in result.runs} == {lines["barrier"]}
    shares = {share.name: share for share in result.modules}
    assert {name: share.calls for name, share in shares.items()} == {
        "Sequential": 9,
        "Sequential/0": 9,
        "Sequential/1": 9,
    }
    assert shares["Sequential"].total >= shares["Sequential/0"].total
    assert lines["barrier"] in {share.name for share in result.lines}


def test_times_of_a_real_loop_add_up(trained):
    result = trained[0].report
    assert sum(s.seconds for s in result.host) == pytest.approx(result.seconds)
    assert sum(s.seconds for s in result.steps) == pytest.approx(result.seconds)
    for step in result.steps:
        assert sum(step.stages.values()) == pytest.approx(step.seconds)
    idle = sum(gap.seconds for gap in result.gaps)
    assert sum(run.seconds for run in result.runs) + idle == pytest.approx(result.seconds, rel=0.01, abs=1e-3)


def test_operators_on_the_host_have_their_line():
    x = torch.ones(3).to("xla")
    with torch_xla.debug.profile() as profiled:
        torch.unique(x)
        line = here(-1)
    (fallback,) = profiled.report.fallbacks
    assert (fallback.op, fallback.line, fallback.count) == ("aten::_unique2", line, 1)
    assert fallback.how.startswith("between two programs")


@pytest.mark.parametrize("turns", [1, 40])
def test_programs_that_end_while_the_host_sleeps(turns):
    x = torch.randn(512, 512).to("xla")
    for _ in range(2):  # the first compiles
        with torch_xla.debug.profile() as profiled:
            y = x
            for _ in range(turns):
                y = torch.tanh(y @ x)
            torch_xla.sync()
            time.sleep(1.0)
        assert y.shape == x.shape
    (run,) = profiled.report.runs
    assert 0 < run.seconds < 0.8  # and not until the block was left


def test_a_module_that_is_called_by_itself_and_inside_another_one():
    inner = nn.Linear(4, 4).to("xla")
    outer = nn.Sequential(nn.Identity(), inner)
    x = torch.ones(2, 4).to("xla")
    with torch_xla.debug.profile() as profiled:
        inner(x)
        torch_xla.sync()
        outer(x)
        torch_xla.sync()
    paths = [module.name for module in profiled.report.modules]
    assert sorted(paths) == ["Linear", "Sequential", "Sequential/0", "Sequential/1"]


def test_two_profiles_at_once():
    before = sys.getswitchinterval()
    with torch_xla.debug.profile() as outer:
        line = here(-1)
        with pytest.raises(RuntimeError, match="a profile runs already, since .*expected one at a time") as error:
            torch_xla.debug.profile().__enter__()
        assert line in str(error.value)
        (torch.ones(2).to("xla") + 1).cpu()
    assert outer.report.reads and sys.getswitchinterval() == before


def test_a_block_that_raises_is_accounted_for_and_leaves_nothing_behind():
    threads = threading.active_count()
    with pytest.raises(KeyError, match="mine"), torch_xla.debug.profile() as profiled:
        with pytest.raises(RuntimeError, match="the block is not over"):
            profiled.report  # noqa: B018
        raise KeyError("mine")
    assert profiled.report.seconds > 0 and not _events.sinks
    assert threading.active_count() == threads
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks


def test_being_watched_makes_no_other_graphs(compiles):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).to("xla")
    batch = torch.ones(4, 8).to("xla")

    def step() -> None:
        model.zero_grad()
        model(batch).sum().backward()
        torch_xla.sync()

    step()
    # Whoever holds a frame holds its tensors, and a tensor that lives over a barrier is one more output.
    with compiles(0), torch_xla.debug.profile() as profiled:
        for _ in range(200):
            step()
    assert len(profiled.report.runs) == 200


def test_nothing_ran():
    with torch_xla.debug.profile() as profiled:
        pass
    assert profiled.report.runs == () and profiled.report.compiles == ()
    assert "Nothing: no graph" in page.html(profiled.report, "x.json")


@pytest.mark.compiled("it is about what is compiled again")
def test_the_table(trained):
    profiled, lines = trained
    pytest.importorskip("rich", reason="the table is drawn by rich, of extra [profile]")
    text = profiled.table(width=400)
    for words_in in ("record", "compile", "execute", "idle", "Sequential/0", words.short(lines["barrier"]), "all 9"):
        assert words_in in text
    assert "compiled again" in text and "float32[4, 8] to float32[3, 8]" in text


def test_a_short_table():
    pytest.importorskip("rich", reason="the table is drawn by rich, of extra [profile]")
    x = torch.ones(3).to("xla")
    (x * 2).cpu()
    with torch_xla.debug.profile() as profiled:
        (x * 2).cpu()
    text = profiled.table(width=120)
    assert "host by step" in text and "compiles, 0" not in text and "host by module" not in text
    assert "waited for the end of the block" not in text


def test_the_table_without_rich(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"\[profile\] rich is not installed; pip install"):
        trained[0].table()


def test_saving(trained, tmp_path):
    profiled, lines = trained
    with pytest.raises(FileNotFoundError, match=r"\[profile\] .*missing.*cannot be written"):
        profiled.save(tmp_path / "missing" / "report.html")
    with pytest.raises(OSError, match="cannot be written"):
        (tmp_path / "taken.html").mkdir()
        profiled.save(tmp_path / "taken.html")
    with pytest.raises(ValueError, match="expected the page's name"):
        profiled.save(tmp_path / "report.json")
    profiled.save(tmp_path / "report.html")
    assert {path.name for path in tmp_path.iterdir()} == {"taken.html", "report.html", "report.json"}
    text = (tmp_path / "report.html").read_text()
    assert words.short(lines["barrier"]).replace("<", "&lt;") in text
    assert "http" not in text.replace("http-equiv", ""), "the page must need no network"
    events = json.loads((tmp_path / "report.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"} and all(e["tid"] > 0 and e["pid"] == 1 for e in events)
    timed = [e for e in events if e["ph"] != "M"]
    assert timed == sorted(timed, key=lambda e: e["ts"])
    for row in {e["tid"] for e in timed if e["ph"] == "X"}:
        ends: list[float] = []  # of what is open, as whole nanoseconds
        for e in (e for e in timed if e["ph"] == "X" and e["tid"] == row):
            start, end = round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)
            while ends and ends[-1] <= start:
                ends.pop()
            assert start <= end <= min(ends, default=end), "what overlaps is nested"
            ends.append(end)
    assert sum(e["name"] == "execute" for e in events) == len(profiled.report.runs)


def test_texts_of_the_program_cannot_break_the_page():
    evil = "</script><script>alert(1)</script>.py:1 in f"
    events = two_steps()
    events.span("read", 36, 37, evil)
    text = page.html(events.report(40), "report.json")
    assert evil not in text and text.count("</script>") == 3


def test_a_long_run_stays_a_small_page():
    events = Events()
    for i in range(200):
        at = i * 0.01
        for part in range(20):
            events.span("TransferToDeviceTime", at + part * 1e-4, at + part * 1e-4 + 5e-5)
        for call in range(150):
            detail = (f"Model.layers.{call}.attention.projection", 1)
            events.span("module", at + 2e-3 + call * 2e-5, at + 2e-3 + call * 2e-5 + 1.5e-5, detail)
        events.span("barrier", at + 8e-3, at + 9e-3, ("user torch_xla.sync", "train.py:9 in step"))
        events.run(at + 8e-3, at + 9.5e-3)
    result = events.report(2)
    assert len(result.calls) == 30_000 and len(page.html(result, "x.json")) <= 2_000_000
