"""Notices: on stderr once, and wherever `logging` is told to bring them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from probes import python

from torch_xla import _notices

KINDS = ("barrier", "fallback", "loop", "retrace")


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_notices, "_lines_left", {"barrier", "other"})
    yield
    for kind in KINDS:
        _notices.forget(kind)


def test_a_notice_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("a", "a", "b", None, None):
        _notices.notify("loop", key, f"at {key}, 100 %")
    _notices.notify("loop", "c", "[file] got a")
    lines = ["torch_xla: at a, 100 %", "torch_xla: at b, 100 %", *["torch_xla: at None, 100 %"] * 2, "[file] got a"]
    assert capsys.readouterr().err.splitlines() == lines
    _notices.forget("loop")
    _notices.notify("loop", "a", "again")
    assert capsys.readouterr().err == "torch_xla: again\n"


@pytest.mark.parametrize("name", ["torch_xla", "torch_xla.loop"])
def test_a_logger_silences_its_notices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(logging.ERROR)
    try:
        _notices.notify("loop", "a", "what")
    finally:
        logger.setLevel(logging.NOTSET)
    assert not capsys.readouterr().err


@contextmanager
def handled() -> Iterator[list[logging.LogRecord]]:
    """What a handler of this package's logger gets."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch_xla")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_a_handler_has_them_instead(capsys: pytest.CaptureFixture[str]) -> None:
    with handled() as records:
        _notices.notify("loop", "a", "what")
    assert not capsys.readouterr().err
    assert [(record.name, record.getMessage()) for record in records] == [("torch_xla.loop", "torch_xla: what")]


def advise() -> None:
    for kind in KINDS:
        for key in ("a", "b", "b"):
            _notices.advise(kind, key, f"all of {kind} {key}", f"train.py:3: {kind} {key}" + " and more" * 20)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["torch_xla: train.py:3: barrier a", "torch_xla: train.py:3: fallback a"]),
        ({"RANK": "1"}, []),
        ({"XLA_NOTICES": "none"}, []),
        *(
            (asked, [f"torch_xla: all of {kind} {key}" for kind in KINDS for key in "ab"])
            for asked in ({"XLA_NOTICES": "all"}, {"PT_XLA_DEBUG_LEVEL": "1"}, {"PT_XLA_DEBUG": "1"})
        ),
    ],
)
def test_advice_is_two_short_lines_unless_more_is_asked_for(
    variables: dict[str, str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    advise()
    lines = capsys.readouterr().err.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
    assert all(len(line) <= 160 for line in lines)
    if not variables:
        assert all(line.endswith("… (docs/debugging.md; XLA_NOTICES=all shows all)") for line in lines)


def test_a_handler_of_details_gets_all_of_it() -> None:
    with handled() as records:
        logging.getLogger("torch_xla").setLevel(logging.DEBUG)
        advise()
    full = [record.getMessage() for record in records if record.levelno == logging.DEBUG]
    assert (
        full == [f"torch_xla: all of {kind} {key}" for kind in KINDS for key in "ab"] and len(records) == len(full) + 2
    )


NOISY = """
import torch, torch_xla
model = torch.nn.Linear(64, 64).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(48):
    x = torch.linspace(-1, 1, 64 * (16 + step % 5)).reshape(-1, 64).to("xla")
    y = model(x[x[:, 0] > 0])
    loss = y.square().mean() * torch.special.airy_ai(y.detach()).mean() + x.unique().mean()
    if loss.item() > 1e9:
        break
    loss.backward()
    optimizer.step()
    losses.append(loss)
    if step < 12:
        torch_xla.sync()
"""


@pytest.mark.parametrize("computed", ["reads", "new"])
@pytest.mark.parametrize("notices", ["few", "all"])
@pytest.mark.costs("programs with every bad habit")
def test_a_program_of_bad_habits_is_told_of_them_in_two_lines(computed: str, notices: str, tmp_path: Path) -> None:
    script = tmp_path / "a program with a long name that works.py"
    script.write_text(NOISY)
    lines = python(script, devices=1, imported=True, XLA_HOST_COMPUTE=computed, XLA_NOTICES=notices).stderr.splitlines()
    if notices == "all":
        assert len(lines) > 2
    else:
        assert 0 < len(lines) <= 2 and all(len(line) <= 160 and "docs/debugging.md" in line for line in lines), lines
