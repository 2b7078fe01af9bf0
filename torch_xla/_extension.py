"""Loads the recorder's library that was compiled for the PyTorch that is installed.

It is looked for beside this file (a build in place, or an install from source), in ``_native/torch-<version>`` (a
wheel), and in the user's cache, where it is compiled if none fits and there is a compiler.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

NAME = "torch_xla._C"
PACKAGE = Path(__file__).parent
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
CORE_MINUTES = 2  # about what the compile takes on one core


def load() -> None:
    """Makes ``torch_xla._C`` what `find` finds, unless it is imported already."""
    if NAME in sys.modules:
        return
    path = find()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise ImportError(
            f"[extension] got {path}, which was not compiled for torch {torch.__version__} ({error}); "
            "install torch_xla again, or run setup.py build_ext --inplace"
        ) from None
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    sys.modules["torch_xla"]._C = module  # type: ignore[attr-defined]  # as an import would


def find() -> Path:
    """The library for the PyTorch that is installed, compiled if need be; ImportError where it cannot be."""
    beside = PACKAGE / f"_C{SUFFIX}"
    if beside.exists():
        return beside
    packed = PACKAGE / "_native" / f"torch-{release(torch.__version__)}" / f"_C{SUFFIX}"
    if packed.exists():
        return packed
    cached = cache_folder() / f"_C{SUFFIX}"
    return cached if cached.exists() else _compiled(cached)


def release(text: str) -> str:
    """The part of PyTorch's version that decides whether a library fits, such as ``2.13``."""
    return ".".join(text.split("+")[0].split(".")[:2])


def packed_releases() -> list[str]:
    """The releases of PyTorch that this install has libraries for."""
    releases = [path.parent.name.removeprefix("torch-") for path in PACKAGE.glob(f"_native/torch-*/_C{SUFFIX}")]
    return sorted(releases, key=lambda text: [int(part) for part in text.split(".")])


def cache_folder() -> Path:
    """The folder for a library that is compiled for this PyTorch, from these sources."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_xla"
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / "csrc").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.read_bytes())
    return root / f"{sys.implementation.cache_tag}-torch-{torch.__version__}-{digest.hexdigest()[:12]}"


def _compiled(target: Path) -> Path:
    """Compiles the library into the user's cache, in one process at a time."""
    script = PACKAGE / "csrc" / "build.py"
    compiler = os.environ.get("CXX", "g++")
    have = ", ".join(packed_releases())
    if not script.exists() or shutil.which(compiler.split()[0]) is None:
        raise ImportError(
            f"[extension] got torch {torch.__version__}, expected {have or 'one that torch_xla was compiled for'}; "
            f"install one of these, or {compiler} and what it needs to compile torch_xla for yours"
        )
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / "lock"):
        if target.exists():
            return target
        cores = len(os.sched_getaffinity(0)) if shutil.which("ninja") else 1  # without it, one file at a time
        took = f"about {-(-CORE_MINUTES // cores)} min on {cores} core{'' if cores == 1 else 's'}"
        print(
            f"torch_xla: compiling for torch {torch.__version__}, once; it takes {took} ({target.parent})",
            file=sys.stderr,
            flush=True,
        )
        out, objects = target.parent / "lib", target.parent / "objects"
        command = [
            sys.executable,
            str(script),
            "-q",
            "build_ext",
            "--build-lib",
            str(out),
            "--build-temp",
            str(objects),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=target.parent, env={**os.environ})
        library = out / "torch_xla" / target.name
        if done.returncode or not library.exists():
            log = target.parent / "log.txt"
            log.write_text(done.stdout + done.stderr)
            raise ImportError(
                f"[extension] torch_xla could not be compiled for torch {torch.__version__}, see {log}; "
                f"it comes compiled for {have or 'no other'}"
            )
        library.replace(target)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(objects, ignore_errors=True)
    return target
