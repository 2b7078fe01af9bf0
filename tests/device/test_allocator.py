"""What the C library is asked to do with memory that programs on a CPU free."""

from __future__ import annotations

import ctypes
from unittest.mock import MagicMock

import pytest

from torch_xla._core.device import allocator


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A C library whose functions have no effect; the environment says nothing of memory."""
    mock = MagicMock(**{"malloc.return_value": 5 << 20})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: mock)
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return mock


def test_freed_memory_is_kept_in_huge_pages(library: MagicMock) -> None:
    allocator.keep_freed()
    calls = [(name, *(getattr(value, "value", value) for value in args)) for name, args, _ in library.mock_calls]
    assert calls[:3] == [("mallopt", -8, 1), ("mallopt", -4, 0), ("mallopt", -1, 5 << 28)]
    aligned = ("madvise", 6 << 20, (1 << 30) - (2 << 20), 14)  # whole huge pages within the block
    assert calls[3:] == [("malloc", 1 << 30), aligned, ("free", 5 << 20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("XLA_CPU_KEEP_MEMORY", "0"), ("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")],
)
def test_the_environment_decides(library: MagicMock, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    allocator.keep_freed()
    assert not library.mock_calls


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    allocator.keep_freed()
