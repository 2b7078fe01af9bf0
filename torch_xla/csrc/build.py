"""Builds the recorder, one C++ extension against the installed torch; setup.py and `torch_xla._extension` run this.

Sources are compiled together, a few folders at a time: most of the time of a source alone goes to PyTorch's headers.
With SEPARATE=1 each is compiled by itself, for whoever edits a file and compiles again and again.
"""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

CSRC = Path(__file__).resolve().parent
# Folders whose sources are compiled as one. A folder that is not named is one by itself.
UNITS = [("bindings", "run", "cut"), ("record", "kernels"), ("base", "device", "ir", "loops", "tensor")]
SEPARATE = bool(os.environ.get("SEPARATE"))
# Debug information doubles the compile time and makes the library thirty times as large.
DEBUG = "-g" if os.environ.get("DEBUG") else "-g0"
# Such as "address,undefined", for `make sanitize`; the check of vtables takes PyTorch's hidden classes for wrong.
SANITIZE = os.environ.get("SANITIZE", "")
OPTIONS = ["-O2", DEBUG]
# PyTorch's own library of C++, also where the compiler would put one into each program: what is thrown with one cannot
# be caught with another.
LINK = ["-l:libstdc++.so.6"]
if SANITIZE:
    SANITIZERS = [f"-fsanitize={SANITIZE}", "-fno-sanitize=vptr"]
    OPTIONS = ["-O1", "-g1", "-fno-omit-frame-pointer", *SANITIZERS]
    LINK += SANITIZERS
# XLA's headers, without which its programs cannot call PyTorch's kernels.
JAXLIB = find_spec("jaxlib")
HEADERS = [f"-isystem{path}/include" for path in (JAXLIB.submodule_search_locations or [] if JAXLIB else [])]
PRECOMPILED = CSRC / "base" / "precompiled.h"


class Build(BuildExtension):
    """Keeps object files in one place for each Python and PyTorch, so that only what changed is compiled."""

    def finalize_options(self) -> None:
        """Sets the place, unless the command line did."""
        build_folder = self.build_temp
        super().finalize_options()
        name = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
        self.build_temp = build_folder or str(Path("build", "sanitized" if SANITIZE else "", name))

    def build_extension(self, extension: Extension) -> None:
        """Compiles the sources together, or each with PyTorch's headers compiled first."""
        if SEPARATE:
            self.precompile(extension)
        else:
            extension.sources = [str(path) for path in write_units(Path(self.build_temp, "units"))]
        super().build_extension(extension)

    def precompile(self, extension: Extension) -> None:
        """Compiles PyTorch's headers, once; a compiler that cannot use the result reads them in each source."""
        folder = Path(self.build_temp, "precompiled").absolute()
        extension.include_dirs.insert(0, str(folder))
        name = str(PRECOMPILED.relative_to(CSRC))
        compiled = folder / f"{name}.gch"
        compiled.parent.mkdir(parents=True, exist_ok=True)
        if not compiled.exists() or compiled.stat().st_mtime < max(
            path.stat().st_mtime for path in (PRECOMPILED, Path(__file__))
        ):
            command = [*shlex.split(os.environ.get("CXX", "c++")), *self.compiler.compiler_so[1:]]
            folders = [f"-I{path}" for path in [*self.compiler.include_dirs, *extension.include_dirs]]
            options = [*folders, *extension.extra_compile_args, "-x", "c++-header", str(PRECOMPILED)]
            subprocess.run([*command, *options, "-o", str(compiled)], check=True)
        extension.extra_compile_args += ["-include", name, "-Winvalid-pch"]


def write_units(folder: Path) -> list[Path]:
    """Writes the sources that include all others; one that has not changed keeps its time, so that ninja skips it."""
    named = {name for unit in UNITS for name in unit}
    others = sorted({path.parent.name for path in CSRC.glob("*/*.cpp")} - named)
    folder.mkdir(parents=True, exist_ok=True)
    units = []
    for unit in [*UNITS, *((name,) for name in others)]:
        path = folder / f"{'_'.join(unit)}.cpp"
        sources = [source.relative_to(CSRC) for name in unit for source in sorted(CSRC.glob(f"{name}/*.cpp"))]
        text = "".join(f'#include "{source}"\n' for source in sources)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        units.append(path)
    return units


def extension() -> Extension:
    """The extension; its sources are named as seen from the current folder where they are below it."""
    here = Path.cwd()
    sources = [path.relative_to(here) if path.is_relative_to(here) else path for path in CSRC.glob("*/*.cpp")]
    return CppExtension(
        "torch_xla._C",
        sorted(map(str, sources)),
        include_dirs=[str(CSRC)],
        extra_compile_args=[*OPTIONS, "-std=c++20", "-fvisibility=hidden", *HEADERS],
        extra_link_args=LINK,
    )


def run(**options: object) -> None:
    """Runs setuptools with what the command line says."""
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    setup(ext_modules=[extension()], cmdclass={"build_ext": Build}, **options)


if __name__ == "__main__":
    run(name="torch_xla_recorder")
