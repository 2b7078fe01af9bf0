"""Which tests a change touches, for `make test-changed`: a table of folders, and a test that it has them all.

Prints what to give to pytest: the test files that changed, and the folders of tests that look at what changed. A rule
of an operator has its family's file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERYTHING = "tests"

# A folder or file → folders and files of tests. The longest that fits a path decides.
TABLE: dict[str, str] = {
    "torch_xla": "public compat",
    "torch_xla/_config.py": "public compat run",
    "torch_xla/_events.py": "report public/test_profile.py public/test_profiler.py",
    "torch_xla/_notices.py": "report barrier/test_auto_barrier.py",
    "torch_xla/_metrics.py": "report",
    "torch_xla/_serialization.py": "tensor torch_utils",
    "torch_xla/_launch.py": "public/test_launch.py job",
    "torch_xla/_compile.py": "barrier",
    "torch_xla/ops": "ops opdb/test_opdb.py lower",
    "torch_xla/_core": "barrier run cut",
    "torch_xla/_core/graph": "graph cut lower",
    "torch_xla/_core/device": "device run",
    "torch_xla/_core/lower": "lower ops/test_layers.py ops/test_enumerations.py cut",
    "torch_xla/_core/job": "job distributed/test_collectives.py distributed/test_waits.py",
    "torch_xla/_core/compile": "compile job/test_compiling.py",
    "torch_xla/_core/execute": "barrier run cut record/test_fallback.py workloads/test_demo.py",
    "torch_xla/_core/report": "report",
    "torch_xla/_core/functions": "functions",
    "torch_xla/_core/torch": "public compat/test_start_up.py functions/test_fake_devices.py",
    "torch_xla/core": "public compat",
    "torch_xla/_internal": "public compat",
    "torch_xla/_legacy": "compat",
    "torch_xla/backends": "compat",
    "torch_xla/test": "compat",
    "torch_xla_py": "compat",
    "torch_xla/_dynamo": "public/test_openxla.py",
    "torch_xla/amp": "torch_utils",
    "torch_xla/amp/syncfree": "torch_utils",
    "torch_xla/debug": "report public/test_profiler.py device/test_memory.py",
    "torch_xla/ahead.py": "public/test_ahead.py",
    "torch_xla/debug/_ahead": "public/test_ahead.py",
    "torch_xla/debug/_profile": "public/test_profile.py public/test_profile_page.py",
    "torch_xla/distributed": "distributed job public/test_loader.py",
    "torch_xla/distributed/fsdp": "distributed",
    "torch_xla/distributed/spmd": "spmd",
    "torch_xla/experimental": "functions compat public torch_utils/test_linear.py",
    "torch_xla/experimental/distributed_checkpoint": "spmd distributed/test_tensors.py",
    "torch_xla/utils": "compat torch_utils public",
    "torch_xla/csrc": "record tensor cut barrier run",
    "torch_xla/csrc/base": "record tensor cut barrier run report",
    "torch_xla/csrc/device": "device record",
    "torch_xla/csrc/ir": "record tensor cut graph",
    "torch_xla/csrc/tensor": "tensor record cut barrier",
    "torch_xla/csrc/loops": "barrier cut",
    "torch_xla/csrc/record": "record tensor ops",
    "torch_xla/csrc/kernels": "record tensor ops torch_utils",
    "torch_xla/csrc/cut": "cut barrier run lower public/test_captured_graph.py workloads/test_agreement.py",
    "torch_xla/csrc/run": "run barrier cut public/test_captured_graph.py",
    "torch_xla/csrc/bindings": "cut barrier run compat/test_imports.py",
    "docs": "docs",
    "README.md": "docs",
    "ARCHITECTURE.md": "docs",
    "CONTRIBUTING.md": "docs",
    "CHANGELOG.md": "docs",
    "examples": "workloads docs/test_notebook.py distributed/test_examples.py",
    "benchmarks": "compat/test_imports.py workloads/test_agreement.py",
    "tests": EVERYTHING,  # what all of them use
    "pyproject.toml": EVERYTHING,
    "setup.py": "public/test_extension.py",
}
# Of no test: what says how to test, or nothing to a program.
UNTESTED = ("Makefile", ".ci", ".github", ".gitignore", ".clang-format", ".pre-commit-config.yaml", "LICENSE", "tools",
            "MANIFEST.in", "SECURITY.md")  # fmt: skip


def of(path: str) -> list[str]:
    """The tests that a changed file touches, as paths from the repository's root."""
    file = Path(path)
    if file.parts[0] == "tests" and len(file.parts) > 2:
        own = file.name.startswith("test_") and file.suffix == ".py"
        return ([path] if (ROOT / path).exists() else []) if own else [str(file.parent)]
    if file.parent == Path("torch_xla/ops"):
        family = sorted(actual.name for actual in (ROOT / "tests/ops").glob(f"test_{file.stem}*.py"))
        if family:
            return [f"tests/ops/{name}" for name in family]
    for place in (path, *map(str, file.parents)):
        if place in UNTESTED:
            return []
        if place in TABLE:
            return [EVERYTHING if name == EVERYTHING else f"tests/{name}" for name in TABLE[place].split()]
    return [EVERYTHING]


def selection(changed: Iterable[str]) -> list[str]:
    """What to run for some changed files: none twice."""
    results = {name for path in changed for name in of(path)}
    return sorted(name for name in results if not any(str(folder) in results for folder in Path(name).parents))


def changed(since: str) -> list[str]:
    """The files that differ from a commit, with those that git does not know yet."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )

    differing = git("diff", "--name-only", since) + git("ls-files", "--others", "--exclude-standard")
    return [path for path in differing if path]


if __name__ == "__main__":
    print(*selection(changed(sys.argv[1])))
