"""Notices: on stderr once, and wherever `logging` is told to bring them."""

import logging
from collections.abc import Iterator

import pytest

from torch_xla import _notices


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    _notices.forget("loop")


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


def test_a_handler_has_them_instead(capsys: pytest.CaptureFixture[str]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("torch_xla").addHandler(handler)
    try:
        _notices.notify("loop", "a", "what")
    finally:
        logging.getLogger("torch_xla").removeHandler(handler)
    assert not capsys.readouterr().err
    assert [(record.name, record.getMessage()) for record in records] == [("torch_xla.loop", "torch_xla: what")]
