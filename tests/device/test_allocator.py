"""What the C library is asked to do with memory that programs on a CPU free."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from torch_xla._core.device import allocator


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The calls of `mallopt` from now on, none of which has an effect; the environment says nothing of memory."""
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda parameter, value: calls.append((parameter, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_freed_memory_is_kept(asked: list[tuple[int, int]]) -> None:
    allocator.keep_freed()
    assert asked == [(-8, 1), (-4, 0), (-1, 1 << 30)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("XLA_CPU_KEEP_MEMORY", "0"), ("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")],
)
def test_who_says_otherwise_is_heard(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    allocator.keep_freed()
    assert not asked


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    allocator.keep_freed()
