"""Builds a wheel with a recorder for each supported PyTorch, and an sdist, into dist/.

For each PyTorch there is an environment under build/wheel/ with its CPU build and jaxlib, whose headers the recorder is
compiled against. The wheel is for the Python that runs this.

Example::

    python tools/wheel.py --torch 2.13.0 2.14.1
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
NATIVE = WORK / f"native-{sys.implementation.cache_tag}"
RELEASES = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]


def run(*command: str | Path, **environment: str) -> None:
    """Runs a command in the root of the project; its failure is this program's."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"wheel: {' '.join(map(str, command))} ended with status {done.returncode}")


def environment_of(release: str, index: str | None) -> Path:
    """The interpreter of an environment with that PyTorch."""
    folder = WORK / f"{sys.implementation.cache_tag}-torch-{release}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "-q"]
        run(*pip, f"torch=={release}", *(["--index-url", index] if index else []))
        run(*pip, "setuptools>=77", "wheel", "ninja", "numpy", "jaxlib>=0.10.2")
        (folder / "complete").touch()
    return python


def compile_for(release: str, python: Path) -> None:
    """Compiles the recorder for a PyTorch and puts it where setup.py looks."""
    out = WORK / f"lib-{release}"
    run(python, "setup.py", "-q", "build_ext", "--build-lib", out)
    target = NATIVE / f"torch-{'.'.join(release.split('.')[:2])}"
    target.mkdir(parents=True, exist_ok=True)
    for library in (out / "torch_xla").glob("_C.*.so"):
        shutil.copy(library, target / library.name)


def main() -> int:
    """Compiles for each PyTorch, then packs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=RELEASES, metavar="RELEASE", help=f"default: {RELEASES}")
    parser.add_argument("--index", help="where pip finds PyTorch's CPU builds")
    parser.add_argument("--here", action="store_true", help="compile for this environment's PyTorch alone")
    options = parser.parse_args()
    shutil.rmtree(NATIVE, ignore_errors=True)
    if options.here:
        import torch

        compile_for(torch.__version__.split("+")[0], Path(sys.executable))
    else:
        for release in options.torch:
            compile_for(release, environment_of(release, options.index))
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", TORCH_XLA_NATIVE=str(NATIVE))
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted((ROOT / "dist").glob("torch_xla-*")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
