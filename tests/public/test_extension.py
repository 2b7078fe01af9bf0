"""Which of several compiled recorders is taken, and what is said where there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from probes import PACKAGE

from torch_xla import _extension


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package without a recorder, with sources that take no time to compile."""
    folder = tmp_path / "torch_xla"
    (folder / "csrc").mkdir(parents=True)
    monkeypatch.setattr(_extension, "PACKAGE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def library(folder: Path) -> Path:
    return folder / f"_C{_extension.SUFFIX}"


def test_one_beside_the_package_comes_first_then_that_of_the_release(package: Path) -> None:
    own = _extension.release(torch.__version__)
    put(library(package / "_native" / "torch-1.2"))
    packed = put(library(package / "_native" / f"torch-{own}"))
    assert _extension.find() == packed
    assert set(_extension.packed_releases()) == {"1.2", own}
    beside = put(library(package))
    assert _extension.find() == beside


@pytest.mark.parametrize(("text", "release"), [("2.13.0+cpu", "2.13"), ("2.14.1", "2.14"), ("2.15.0a0+git1", "2.15")])
def test_releases(text: str, release: str) -> None:
    assert _extension.release(text) == release


def test_without_a_compiler_the_import_says_which_releases_work(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("1.10", "1.2"):
        put(library(package / "_native" / f"torch-{release}"))
    put(package / "csrc" / "build.py")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ImportError, match=r"expected 1\.2, 1\.10; install one of these, or no-such-compiler") as said:
        _extension.find()
    assert "\n" not in str(said.value)


def test_it_is_compiled_once_into_the_cache(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
import importlib.machinery, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--build-lib") + 1]) / "torch_xla"
out.mkdir(parents=True)
(out / ("_C" + importlib.machinery.EXTENSION_SUFFIXES[0])).write_text("made")
"""
    (package / "csrc" / "build.py").write_text(script)
    result = _extension.find()
    assert result.read_text() == "made"
    assert result.parent == _extension.cache_folder()
    assert "compiling for torch" in capsys.readouterr().err
    assert _extension.find() == result
    assert not capsys.readouterr().err
    (package / "csrc" / "more.h").touch()
    (package / "csrc" / "more.h").write_text("// other sources are another library")
    assert _extension.cache_folder() != result.parent


def test_a_failure_to_compile_is_one_line_and_a_log(package: Path) -> None:
    (package / "csrc" / "build.py").write_text("raise SystemExit('no headers')")
    with pytest.raises(ImportError, match="could not be compiled") as said:
        _extension.find()
    assert "\n" not in str(said.value)
    assert "no headers" in (_extension.cache_folder() / "log.txt").read_text()


def test_one_for_another_torch_is_told_of(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(library(package)).write_bytes(b"not a library")
    monkeypatch.delitem(sys.modules, _extension.NAME)
    with pytest.raises(ImportError, match=r"which was not compiled for torch .*install torch_xla again"):
        _extension.load()


@pytest.mark.costs("a process that imports all anew")
def test_the_sources_can_be_compiled_from_anywhere(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    script = PACKAGE / "torch_xla" / "csrc" / "build.py"
    done = subprocess.run(
        [sys.executable, str(script), "--name", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch_xla_recorder", "0.0.0"]
