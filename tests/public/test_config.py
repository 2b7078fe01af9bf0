"""Environment variables: parsing, defaults, overrides."""

import ast
import pathlib

import pytest
from probes import ROOT

import torch_xla
from torch_xla import _config
from torch_xla._errors import listing, message


@pytest.mark.parametrize(
    ("raw", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False), ("", False)]
)
def test_switches(monkeypatch, raw, value):
    monkeypatch.setenv("XLA_IR_DEBUG", raw)
    assert _config.XLA_IR_DEBUG.get() is value


@pytest.mark.parametrize(
    ("option", "raw", "expected"),
    [
        (_config.XLA_IR_DEBUG, "maybe", "a switch: '1', 'true'"),
        (_config.CPU_NUM_DEVICES, "0", "a whole number from 1 to 127"),
        (_config.CPU_NUM_DEVICES, "200", "a whole number from 1 to 127"),
        (_config.CPU_NUM_DEVICES, "many", "a whole number from 1 to 127"),
        (_config.XLA_SAVE_TENSORS_FMT, "pdf", "'text', 'hlo', 'stablehlo' or 'dot'"),
        (_config.RATE_TRACKER_SMOOTHING, "2", "a number from 0.0 to 1.0"),
    ],
)
def test_wrong_values_are_rejected_with_the_right_ones(monkeypatch, option, raw, expected):
    monkeypatch.setenv(option.name, raw)
    with pytest.raises(ValueError) as caught:
        option.get()
    assert str(caught.value).startswith(f"[config] {option.name}={raw!r}, expected {expected}")


def test_defaults_and_values(monkeypatch):
    for option in _config.options():
        monkeypatch.delenv(option.name, raising=False)
    assert _config.CPU_NUM_DEVICES.get() == 1 and not _config.CPU_NUM_DEVICES.is_set()
    assert _config.PJRT_DEVICE.get() is None and _config.XLA_SAVE_TENSORS_FMT.get() == "text"
    monkeypatch.setenv("CPU_NUM_DEVICES", " 3 ")
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "HLO")
    monkeypatch.setenv("XLA_METRICS_PERCENTILES", "0:0.5")
    assert _config.CPU_NUM_DEVICES.get() == 3 and _config.CPU_NUM_DEVICES.is_set()
    assert _config.XLA_SAVE_TENSORS_FMT.get() == "hlo" and _config.XLA_METRICS_PERCENTILES.get() == (0.0, 0.5)


def test_writing_into_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_IR_DEBUG", "0")
    _config.XLA_IR_DEBUG.set(True)
    assert _config.XLA_IR_DEBUG.get() is True
    _config.XLA_IR_DEBUG.set(None)
    assert not _config.XLA_IR_DEBUG.is_set()


def test_a_variable_may_be_set_and_removed_at_any_time(monkeypatch):
    option = _config.XLA_METRICS_FILE
    monkeypatch.delenv(option.name, raising=False)
    assert option.get() is None and not option.is_set()
    for path in ("one", "other"):
        monkeypatch.setenv(option.name, path)
        assert option.get() == path and option.is_set()
    monkeypatch.delenv(option.name)
    assert option.get() is None and not option.is_set()


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES is declared twice"):
        _config._int("CPU_NUM_DEVICES", 1, "Again.")


def test_the_page_of_variables_is_complete():
    """It is written by print(_config.page(), end="")."""
    page = (ROOT / "docs/environment.md").read_text()
    assert page == _config.page()
    for option in _config.options():
        assert page.count(f"| `{option.name}` |") == 1 and option.doc.endswith(".") and "|" not in option.doc


def test_no_option_is_declared_in_vain():
    root = pathlib.Path(torch_xla.__file__).parent
    used = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_config":
                used.add(node.attr)
    declared = {name for name, value in vars(_config).items() if isinstance(value, _config.Option)}
    assert declared <= used, f"nobody reads {sorted(declared - used)}"


def test_messages():
    assert message("area", "got 1") == "[area] got 1"
    assert message("area", "got 1", expected="2", do="fix it") == "[area] got 1, expected 2; fix it"
    assert listing([1, 2, 3]) == "1, 2 or 3" and listing(["a"]) == "'a'" and listing([]) == ""
