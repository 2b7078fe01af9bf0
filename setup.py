"""Builds the recorder by torch_xla/csrc/build.py; everything else is in pyproject.toml.

With TORCH_XLA_NATIVE, a folder of compiled recorders (`torch-2.13/_C.*.so`), a wheel takes those instead: `make wheel`.
"""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class WithRecorders(build_py):
    """Puts the compiled recorders into the package."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # of another build, with its own recorder
        super().run()
        for library in Path(os.environ["TORCH_XLA_NATIVE"]).glob("torch-*/_C.*.so"):
            target = Path(self.build_lib, "torch_xla", "_native", library.parent.name)
            self.mkpath(str(target))
            self.copy_file(str(library), str(target / library.name))


class Compiled(Distribution):
    """A wheel of this platform, although nothing is compiled."""

    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    if "TORCH_XLA_NATIVE" in os.environ:
        setup(distclass=Compiled, cmdclass={"build_py": WithRecorders})
    else:
        runpy.run_path(str(ROOT / "torch_xla" / "csrc" / "build.py"))["run"]()
