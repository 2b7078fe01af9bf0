"""The cache of executables: what it counts, how much it keeps, and what it writes to a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import sampled, setting

import torch_xla
from torch_xla import _config, debug
from torch_xla._core.compile import cache
from torch_xla._core.execute import pipeline
from torch_xla.debug import metrics


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No executable in memory and no folder, before and after."""
    torch_xla.sync()
    monkeypatch.setattr(cache, "_folder", None)
    monkeypatch.setattr(cache, "_readonly", False)
    cache.clear()
    yield
    cache.clear()


def run(number: float = 2.5, size: int = 6, device: str = "xla:0") -> list[float]:
    """A barrier with one graph, which depends on the size and the device."""
    y = torch.arange(float(size)).to(device) * number
    torch_xla.sync()
    return y.tolist()


EXPECTED = [0.0, 2.5, 5.0, 7.5, 10.0, 12.5]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestMemory:
    def test_a_graph_is_compiled_once(self, counted: Counting) -> None:
        with counted("UncachedCompile", 1), counted("CachedCompile", 3):
            for i in range(4):
                run(i + 2.5)
        assert cache.num_graphs() == 1

    def test_graphs_used_long_ago_make_room_for_memory_mappings(
        self, monkeypatch: pytest.MonkeyPatch, counted: Counting
    ) -> None:
        limit, used = cache._maps()
        assert 0 < used < limit
        monkeypatch.setattr(cache, "_maps", lambda: (100, 30 * cache.num_graphs()))
        monkeypatch.setattr(cache, "_stores_to_come", 0)
        with counted("ExecutablesDropped", 2):
            for size in (3, 4, 5, 3, 6, 7):
                run(size=size)
        assert cache.num_graphs() == 3
        with counted("UncachedCompile", 0):
            for size in (3, 6, 7):
                assert run(size=size)[:3] == EXPECTED[:3]

    def test_each_shape_and_device_is_a_graph(self, counted: Counting) -> None:
        with counted("UncachedCompile", 3), counted("CachedCompile", 3):
            for _ in range(2):
                run(size=6)
                run(size=7)
                run(size=6, device="xla:1")

    def test_what_was_not_used_longest_goes_first(self, monkeypatch: pytest.MonkeyPatch, compiles: Counting) -> None:
        monkeypatch.setattr(cache, "_CAPACITY", 2)
        run(size=6)
        run(size=7)
        with compiles(0):
            run(size=6)
        with compiles(1):
            run(size=8)
        assert cache.num_graphs() == 2
        with compiles(0):
            run(size=6)
        with compiles(1):
            run(size=7)

    def test_a_program_may_be_dropped_while_it_runs(self, compiles: Counting) -> None:
        run()
        y = torch.arange(6.0).to("xla") * 2.5
        torch_xla.sync()
        cache.clear()
        assert y.tolist() == EXPECTED and cache.num_graphs() == 0
        with compiles(1):
            assert run() == EXPECTED

    @pytest.mark.parametrize("watched", [False, True])
    def test_however_it_is_run(self, watched: bool, counted: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
        run()
        monkeypatch.setattr(pipeline, "_is_observed", lambda: watched)
        with counted("UncachedCompile", 0), counted("CachedCompile", 3), sampled("TensorsGraphSize", 3):
            for number in (0.5, 0.75, -2.5):
                assert run(number) == [number * i for i in range(6)]

    def test_without_a_folder_nothing_is_said_of_it(self, counted: Counting) -> None:
        with counted("PersistentCacheMiss", 0), counted("PersistentCacheHit", 0):
            run()

    def test_nothing_pending_is_no_graph(self, counted: Counting) -> None:
        run()
        with counted("UncachedCompile", 0), counted("CachedCompile", 0):
            torch_xla.sync()


class TestFolder:
    def test_a_later_process_neither_lowers_nor_compiles(self, tmp_path: Path, counted: Counting) -> None:
        cache.initialize(str(tmp_path))
        with counted("PersistentCacheMiss", 1), counted("UncachedCompile", 1):
            assert run() == EXPECTED
        (name,) = files(tmp_path)
        assert name.endswith(".xla")
        cache.clear()
        with (
            counted("PersistentCacheHit", 1),
            counted("UncachedCompile", 0),
            counted("CachedCompile", 2),
            sampled("LoweringTime", 0),
            sampled("CompileTime", 0),
        ):
            for number in (2.5, -2.5, 2.5):
                assert run(number) == [value * number / 2.5 for value in EXPECTED]
        assert files(tmp_path) == [name]

    def test_reports_say_what_the_folder_had(self, tmp_path: Path) -> None:
        metrics.clear_all()
        cache.initialize(str(tmp_path))
        with debug.profile() as seen:
            run()
        assert "0 of 1 new graph came from the persistent cache" in seen.table(200)
        cache.clear()
        with debug.profile() as seen:
            run()
            run()
        assert (seen.report.looked_up, seen.report.loaded) == (1, 1)
        told = metrics.short_metrics_report()
        assert "Counter: PersistentCacheHit\n  Value: 1\nCounter: PersistentCacheMiss\n  Value: 1\n" in told

    def test_a_training_step_comes_back(self, tmp_path: Path, compiles: Counting) -> None:
        def train(device: str) -> list[float]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            x = torch.linspace(-1, 1, 12).reshape(3, 4).to(device)
            losses = []
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                torch_xla.sync()
                losses.append(loss.detach())
            return torch.stack(losses).tolist()

        cache.initialize(str(tmp_path))
        fresh = train("xla")
        cache.clear()
        with compiles(0):
            stored = train("xla")
        assert stored == fresh
        assert stored == pytest.approx(train("cpu"), rel=1e-4)

    def test_random_numbers_come_back(self, tmp_path: Path, compiles: Counting) -> None:
        def draw() -> list[float]:
            torch_xla.manual_seed(7)
            x = torch.rand(5, device="xla")
            torch_xla.sync()
            return x.tolist()

        cache.initialize(str(tmp_path))
        fresh = draw()
        cache.clear()
        with compiles(0):
            assert draw() == fresh

    def test_devices_have_files_of_their_own(self, tmp_path: Path, counted: Counting) -> None:
        cache.initialize(str(tmp_path))
        run()
        run(device="xla:1")
        assert len(files(tmp_path)) == 2

    def test_a_later_process_may_use_any_device(self, tmp_path: Path, counted: Counting) -> None:
        cache.initialize(str(tmp_path))
        run(device="xla:1")
        cache.clear()
        with counted("PersistentCacheHit", 1):
            assert run(device="xla:1") == EXPECTED

    def test_read_only(self, tmp_path: Path, counted: Counting) -> None:
        cache.initialize(str(tmp_path))
        run()
        known = files(tmp_path)
        cache.initialize(str(tmp_path), readonly=True)
        cache.clear()
        with counted("PersistentCacheHit", 1), counted("UncachedCompile", 0):
            assert run() == EXPECTED
        with counted("PersistentCacheMiss", 1), counted("UncachedCompile", 1):
            run(size=9)
        assert files(tmp_path) == known

    def test_read_only_makes_no_folder(self, tmp_path: Path) -> None:
        cache.initialize(str(tmp_path / "missing"), readonly=True)
        assert run() == EXPECTED
        assert files(tmp_path) == []

    def test_folders_are_made(self, tmp_path: Path) -> None:
        cache.initialize(str(tmp_path / "some" / "where"))
        run()
        assert len(files(tmp_path / "some" / "where")) == 1

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RuntimeError, match=r"\[cache\] got .*expected a folder that can be written.*readonly=True"):
            cache.initialize(str(tmp_path / "file" / "cache"))
        assert cache._folder is None

    def test_a_folder_that_goes_away(self, tmp_path: Path, counted: Counting) -> None:
        folder = tmp_path / "cache"
        cache.initialize(str(folder))
        folder.rmdir()
        with counted("PersistentCacheWriteFailed", 1):
            assert run() == EXPECTED

    @pytest.mark.own_client("programs call the host")
    def test_programs_that_call_back_into_this_process_are_not_written(self, tmp_path: Path, counted: Counting) -> None:
        cache.initialize(str(tmp_path))
        with counted("UncachedCompile", 1):
            y = torch.special.airy_ai(torch.linspace(0, 1, 6).to("xla"))
            torch_xla.sync()
        assert files(tmp_path) == []
        torch.testing.assert_close(y.cpu(), torch.special.airy_ai(torch.linspace(0, 1, 6)))

    @pytest.mark.parametrize("damage", [lambda raw: raw[:100], lambda raw: b"", lambda raw: raw[:-1] + b"?"])
    def test_a_damaged_file_is_replaced(
        self, tmp_path: Path, counted: Counting, damage: Callable[[bytes], bytes]
    ) -> None:
        cache.initialize(str(tmp_path))
        run()
        (path,) = tmp_path.iterdir()
        path.write_bytes(damage(path.read_bytes()))
        cache.clear()
        with counted("PersistentCacheDamaged", 1), counted("UncachedCompile", 1):
            assert run() == EXPECTED
        cache.clear()
        with counted("PersistentCacheHit", 1):
            run()

    def test_it_keeps_below_its_size_limit(self, tmp_path: Path, counted: Counting) -> None:
        cache.initialize(str(tmp_path))
        run()
        (kept,) = tmp_path.iterdir()
        os.utime(kept, (1, 1))  # used long ago
        (tmp_path / ".left.part").write_bytes(b"of a process that was killed")
        os.utime(tmp_path / ".left.part", (0, 0))
        limit = kept.stat().st_size * 3 // 2  # two programs are not of the same size to the byte
        with setting(_config.XLA_PERSISTENT_CACHE_MAX_BYTES, limit), counted("PersistentCacheRemoved", 2):
            run(size=5)
        assert kept.name not in files(tmp_path) and len(files(tmp_path)) == 1

    def test_a_program_that_is_loaded_is_in_use(self, tmp_path: Path) -> None:
        cache.initialize(str(tmp_path))
        run()
        (kept,) = tmp_path.iterdir()
        os.utime(kept, (1, 1))
        cache.clear()
        run()
        assert kept.stat().st_mtime > 1

    def test_a_program_that_cannot_be_written_runs(
        self,
        tmp_path: Path,
        counted: Counting,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        class Loaded:
            def serialize(self) -> bytes:
                raise RuntimeError("UNIMPLEMENTED")

        cache.initialize(str(tmp_path))
        save = cache._save

        def unable(cut: Any, executable: Any) -> None:
            save(cut, SimpleNamespace(loaded=Loaded()))  # type: ignore[arg-type]

        monkeypatch.setattr(cache, "_save", unable)
        metrics.clear_all()
        with counted("PersistentCacheWriteFailed", 2):
            assert run() == EXPECTED
            run(size=5)
        assert files(tmp_path) == []
        told = f"torch_xla: a compiled graph could not be kept in {tmp_path}: UNIMPLEMENTED"
        assert capsys.readouterr().err.splitlines().count(told) == 1

    def test_a_folder_that_others_can_write_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        with pytest.raises(RuntimeError, match=r"into which everybody can write, expected .* XLA_PERSISTENT_CACHE_TR"):
            cache.initialize(str(tmp_path))
        with setting(_config.XLA_PERSISTENT_CACHE_TRUSTED, True):
            cache.initialize(str(tmp_path))
        tmp_path.chmod(0o700)

    def test_the_environment_may_name_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Counting
    ) -> None:
        cache._initialize_from_environment.cache_clear()
        with setting(_config.XLA_PERSISTENT_CACHE_PATH, str(tmp_path)):
            run()
        assert len(files(tmp_path)) == 1
        cache._initialize_from_environment.cache_clear()
        cache.clear()
        monkeypatch.setattr(cache, "_folder", None)
        with (
            setting(_config.XLA_PERSISTENT_CACHE_PATH, str(tmp_path)),
            setting(_config.XLA_PERSISTENT_CACHE_READ_ONLY, True),
            counted("PersistentCacheHit", 1),
        ):
            run()
            run(size=9)
        assert len(files(tmp_path)) == 1
