"""Reports of counters and metrics."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from probes import setting

import torch_xla
import torch_xla.debug.metrics as met
from torch_xla import _bindings, _config, _metrics
from torch_xla._core.report import debug_level
from torch_xla.debug import metrics_compare_utils as mcu
from torch_xla.debug import metrics_saver


@pytest.fixture(autouse=True)
def empty():
    torch_xla.sync(wait=True)
    met.clear_all()
    yield
    met.clear_all()


@pytest.mark.compiled("it counts runs of programs")
def test_a_step_is_counted_and_timed():
    x = torch.ones(3, 5).to("xla")
    for _ in range(3):
        y = (x * 2).tanh()
        torch_xla.sync()
    assert y.cpu().shape == (3, 5)
    assert met.counter_value("MarkStep") == 3
    assert met.counter_value("UncachedCompile") + (met.counter_value("CachedCompile") or 0) == 3
    for name in ("CompileTime", "ExecuteTime", "LoweringTime", "TransferToDeviceTime", "TransferFromDeviceTime"):
        if name in ("CompileTime", "LoweringTime") and met.counter_value("UncachedCompile") is None:
            continue
        count, total, samples = met.metric_data(name)
        assert count >= 1 and total > 0 and len(samples) == count
        assert sum(value for _, value in samples) == pytest.approx(total)
    assert met.metric_data("ExecuteTime")[0] == 3


def test_tensors_are_counted():
    torch.ones(2, device="xla")
    assert met.counter_value("CreateXlaTensor") >= 1
    assert "Counter: CreateXlaTensor\n  Value: " in met.metrics_report()
    met.clear_counters()
    assert met.counter_value("CreateXlaTensor") is None


def test_clearing():
    _metrics.count("aten::roll")
    _metrics.add_sample("CompileTime", 1.0)
    assert "aten::roll" in met.counter_names() and met.metric_names() == ["CompileTime"]
    met.clear_counters()
    assert "aten::roll" not in met.counter_names() and met.metric_names() == ["CompileTime"]
    met.clear_metrics()
    assert met.metric_names() == [] and met.metric_data("CompileTime") is None


def test_layout_of_the_report(monkeypatch):
    for value in (0.5, 1.25, 0.000002):
        _metrics.add_sample("CompileTime", value)
    taken = _bindings.metric("CompileTime")
    assert taken is not None
    samples = [(moment, value) for moment, (_, value) in zip((100.0, 102.0, 104.0), taken[3], strict=True)]
    _metrics.add_sample("InboundData", 3 * 2**20, "bytes")
    _metrics.add_sample("GraphSize", 7, "nodes")
    _metrics.count("CachedCompile", 3)
    result, moved = _bindings.metric, (*taken[:3], samples, *taken[4:])
    monkeypatch.setattr(_bindings, "metric", lambda name: moved if name == "CompileTime" else result(name))
    with setting(_config.XLA_METRICS_PERCENTILES, "0:0.5:0.99"):
        report = met.metrics_report()
    assert report == (
        "Metric: CompileTime\n"
        "  TotalSamples: 3\n"
        "  Accumulator: 01s750ms002.000us\n"
        "  ValueRate: 437ms500.500us / second\n"
        "  Rate: 0.75 / second\n"
        "  Percentiles: 0%=002.000us; 50%=500ms000.000us; 99%=01s250ms000.000us\n"
        "Metric: GraphSize\n"
        "  TotalSamples: 1\n"
        "  Accumulator: 7.00\n"
        "  Percentiles: 0%=7.00; 50%=7.00; 99%=7.00\n"
        "Metric: InboundData\n"
        "  TotalSamples: 1\n"
        "  Accumulator: 3.00MB\n"
        "  Percentiles: 0%=3.00MB; 50%=3.00MB; 99%=3.00MB\n"
        "Counter: CachedCompile\n"
        "  Value: 3\n"
    )
    assert met.metric_data("CompileTime") == (
        3,
        pytest.approx(1.750002e9),
        ((100.0, 5e8), (102.0, 1.25e9), (104.0, 2e3)),
    )
    assert met.metric_data("InboundData")[1] == 3 * 2**20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "000.000us"),
        (0.0123456, "012ms345.600us"),
        (93784.5, "01d02h03m04s500ms000.000us"),
        (60.0, "01m00s000ms000.000us"),
    ],
)
def test_durations(seconds, text):
    assert met._duration(seconds) == text


def test_the_short_report():
    for name in ("CompileTime", "ExecuteTime", "LoweringTime"):
        _metrics.add_sample(name, 1.0)
    for name in ("CachedCompile", "MarkStep", "Other", "aten::roll"):
        _metrics.count(name)
    report = met.short_metrics_report()
    for name in ("CompileTime", "ExecuteTime", "CachedCompile", "MarkStep", "aten::roll"):
        assert f": {name}\n" in report
    assert "LoweringTime" not in report and "Other" not in report
    chosen = met.short_metrics_report(counter_names=["Other"], metric_names=["LoweringTime"])
    assert "Other" in chosen and "LoweringTime" in chosen and "aten::roll" in chosen
    assert "MarkStep" not in chosen and "CompileTime" not in chosen
    assert met.executed_fallback_ops() == ["aten::roll"]


def test_samples_are_bounded_and_counts_are_not():
    for _ in range(5000):
        _metrics.add_sample("ExecuteTime", 1.0)
    count, total, samples = met.metric_data("ExecuteTime")
    assert count == 5000 and total == 5000e9 and len(samples) == 1024


def test_counting_from_many_threads():
    def work():
        for _ in range(1000):
            _metrics.count("CachedCompile")

    with ThreadPoolExecutor(8) as pool:
        [pool.submit(work) for _ in range(8)]
    assert met.counter_value("CachedCompile") == 8000


def test_reports_of_each_step_go_to_a_file(tmp_path):
    path = tmp_path / "metrics.txt"
    with setting(_config.XLA_METRICS_FILE, str(path)):
        torch_xla.sync()
        torch_xla.sync()
    text = path.read_text()
    assert text.count("[MetricsData; step=") == 2 and "Counter: MarkStep\n  Value: 2\n" in text
    torch_xla.sync()
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, capfd):
    with setting(_config.XLA_METRICS_FILE, str(tmp_path)):
        torch_xla.sync()
        torch_xla.sync()
        with pytest.raises(IsADirectoryError):
            metrics_saver.save_metrics()
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith(f"[metrics] XLA_METRICS_FILE={str(tmp_path)!r}, which cannot be written (Is a directory)")


def test_reports_go_to_the_terminal(capsys):
    _metrics.count("CachedCompile")
    metrics_saver.save_metrics("STDERR")
    metrics_saver.save_metrics("STDOUT")
    captured = capsys.readouterr()
    assert "CachedCompile" in captured.out and "CachedCompile" in captured.err
    metrics_saver.save_metrics()
    assert not capsys.readouterr().out


def test_bad_percentiles_are_rejected(monkeypatch):
    _metrics.add_sample("CompileTime", 1.0)
    monkeypatch.setenv("XLA_METRICS_PERCENTILES", "0.5:2")
    with pytest.raises(ValueError, match=r"\[config\] XLA_METRICS_PERCENTILES='0.5:2', expected fractions"):
        met.metrics_report()


@pytest.mark.compiled("it counts runs of programs")
def test_reads_and_bytes_are_counted():
    x = torch.ones(4, 25).to("xla")
    assert met.metric_data("OutboundData")[:2] == (1, 400.0)
    y = (x * 2).sin()
    torch_xla.sync()
    assert met.metric_data("TensorsGraphSize")[:2] == (1, 2.0)
    assert y.cpu().shape == (4, 25)
    assert met.metric_data("InboundData")[:2] == (1, 400.0)
    assert met.executed_fallback_ops() == []
    if y.sum() > 0:
        y.mean().item()
    assert met.executed_fallback_ops() == ["aten::_local_scalar_dense"]
    assert "Counter: aten::_local_scalar_dense\n  Value: 2\n" in met.short_metrics_report()


def test_recording_is_counted_and_timed_in_samples():
    x = torch.ones(4).to("xla")
    met.clear_all()
    for _ in range(256):
        x = x + 1
    calls, total, samples = met.metric_data("LazyTracing")
    assert calls == 256 and total > 0 and len(samples) == 4  # one call in 64 is timed
    assert "LazyTracing" in met.metric_names()
    (rate,) = re.findall(r"Metric: LazyTracing\n(?:  .*\n)*?  Rate: (\S+) / second", met.metrics_report())
    assert float(rate) == pytest.approx(256 / (samples[-1][0] - samples[0][0]), rel=1e-4)
    met.clear_metrics()
    assert met.metric_data("LazyTracing") is None and "LazyTracing" not in met.metrics_report()


def test_a_tensor_is_made_and_destroyed_once():
    met.clear_counters()
    x = torch.tensor(2077, device="xla")
    assert met.counter_value("CreateXlaTensor") == 1 and met.counter_value("DestroyXlaTensor") is None
    torch_xla._XLAC._xla_increment_counter("CreateXlaTensor", 3)
    assert met.counter_value("CreateXlaTensor") == 4
    assert met.counter_names().count("CreateXlaTensor") == 1
    del x
    assert met.counter_value("DestroyXlaTensor") == 1


@pytest.mark.compiled("it counts runs of programs")
def test_a_run_counts_until_the_host_has_waited_for_it():
    x = torch.ones(700, 700).to("xla")
    y = x
    for _ in range(20):
        y = y @ x
    torch_xla.sync()
    started = met.metric_data("ExecuteTime")
    torch_xla.sync(wait=True)
    waited, longer = met.metric_data("DeviceLockWait"), met.metric_data("ExecuteTime")
    assert longer[0] == started[0] == 1
    assert longer[1] - started[1] == pytest.approx(sum(value for _, value in waited[2]), abs=1)
    assert longer[2][0][1] == pytest.approx(longer[1])


@pytest.mark.compiled("it counts runs of programs")
def test_stages_of_a_run_have_metrics():
    x = torch.ones(3).to("xla") * 7
    torch_xla.sync()
    x.cpu()
    names = met.metric_names()
    assert {"TensorToData", "UnwrapXlaData", "WrapXlaData", "DeviceLockWait", "TensorsGraphSize"} <= set(names)
    assert met.metric_data("WrapXlaData")[0] == 1


class TestCompare:
    REPORT = (
        "some other line\nMetric: InboundData\n  TotalSamples: 4\n  Accumulator: 1.50GB\n"
        "  Percentiles: 1%=2.00KB; 50%=1.00MB\nMetric: CompileTime\n  TotalSamples: 2\n"
        "  Accumulator: 01d02h03m04s005ms006.5us\n  ValueRate: 1s / second\n  Rate: 2 / second\n"
        "  Percentiles: 50%=05m004ms\nMetric: Size\n  TotalSamples: 1\n  Accumulator: 7.00\n"
        "Counter: MarkStep\n  Value: 12\n"
    )

    def test_a_report_is_read(self):
        assert mcu.parse_metrics_report(self.REPORT) == pytest.approx(
            {
                "InboundData__TotalSamples": 4,
                "InboundData__Accumulator_mb": 1500,
                "InboundData__Percentile_1_mb": 0.002,
                "InboundData__Percentile_50_mb": 1,
                "CompileTime__TotalSamples": 2,
                "CompileTime__Accumulator_sec": 93784.0050065,
                "CompileTime__Percentile_50_sec": 300.004,
                "Size__TotalSamples": 1,
                "Size__Accumulator": 7,
                "MarkStep__Value": 12,
            }
        )
        assert mcu.parse_metrics_report(self.REPORT, False)["InboundData__Accumulator_mb"] == (1500, "1.50GB")

    def test_own_reports_are_read(self):
        _metrics.add_sample("CompileTime", 93784.0050065)
        _metrics.add_sample("InboundData", 3 * 2**20, "bytes")
        result = mcu.parse_metrics_report(met.metrics_report())
        assert result["CompileTime__Accumulator_sec"] == pytest.approx(93784.0050065)
        assert result["InboundData__Percentile_99_mb"] == 3

    def test_what_is_no_value_is_refused(self):
        with pytest.raises(ValueError, match=r"^\[metrics\] got value '3 apples'"):
            mcu.parse_metrics_report("Metric: A\n  Accumulator: 3 apples\n")

    def test_what_leaves_the_range_is_told(self):
        history = mcu.get_data_points_from_metrics_reports([self.REPORT, "Counter: MarkStep\n  Value: 14\n"])
        assert history["MarkStep__Value"] == [12, 14] and history["Size__TotalSamples"] == [1, None]
        assert mcu.compare_metrics(history, "Counter: MarkStep\n  Value: 15\n") == ""
        report = "Counter: MarkStep\n  Value: 16\nCounter: aten::sort\n  Value: 2\nCounter: New\n  Value: 3\n"
        assert mcu.compare_metrics(history, report) == (
            "MarkStep__Value failed its expression check. Expression: v <= v_mean + (v_stddev * 2.0).  Mean: 13.0.  "
            "Stddev: 1.0.  Actual Value: 16\nFound new aten counter: aten::sort__Value: 2\n"
        )
        assert mcu.compare_metrics(history, report, {"base_expression": "v > v_mean"}).startswith("Found new")


def test_what_stands_out(capfd, monkeypatch):
    assert debug_level.findings() == []
    _metrics.count("MarkStep", 20)
    for _ in range(11):
        _metrics.add_sample("CompileTime", 1.0)
        _metrics.add_sample("TransferFromDeviceTime", 1.0)
    _metrics.add_sample("ExecuteTime", 31.0)
    _metrics.count("aten::nonzero")
    _metrics.count("aten::_local_scalar_dense")
    starts = [line.split(";")[0] for line in debug_level.findings()]
    assert starts == [
        "CompileTime too frequent: 11 counts during 20 steps",
        "TransferFromDeviceTime too frequent: 11 counts during 20 steps",
        "ExecuteTime too slow: longest instance took 31 s",
        "Op(s) not lowered: aten::nonzero",
    ]
    debug_level.at_exit()
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("PT_XLA_DEBUG", "1")
    debug_level.at_exit()
    assert capfd.readouterr().err.startswith("pt-xla-profiler: CompileTime too frequent: 11 counts")
