"""Which module may import which, and which header of csrc; what an import may cost, and how long a file may get."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from probes import ROOT, python

PACKAGE = ROOT / "torch_xla"
# The folders of `_core` and those of `csrc`, from the bottom to the top.
CORE = ("graph", "device", "lower", "job", "compile", "report", "execute", "functions", "torch")
CSRC = ("base", "device", "ir", "tensor", "loops", "record", "kernels", "cut", "run", "bindings")
LAYERS = ("bindings", "settings", "ops", *(f"_core/{folder}" for folder in CORE), "public", "experimental")
SETTINGS = (
    "_capture _config _deprecation _errors _events _fallbacks _files _jax_internals _metrics _notices _torch_internals"
).split()
LIMITS = {".py": 600, ".cpp": 500, ".h": 500}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> int:
    """Index in LAYERS; a module may import from its own layer and from lower ones, the package root from all."""
    head = module.split(".")[1] if "." in module else ""
    if head in SETTINGS:
        return LAYERS.index("settings")
    if head in ("_bindings", "_C", "_extension"):
        return LAYERS.index("bindings")
    if module == "torch_xla._core":
        return 0  # empty
    if head == "_core":
        return LAYERS.index(f"_core/{module.split('.')[2]}")
    if head in ("ops", "experimental"):
        return LAYERS.index(head)
    return LAYERS.index("public")


@functools.cache
def imports(module: str) -> list[tuple[int, str]]:
    """(line, imported module of this package) for every import, inside functions and for types alone too."""
    targets: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            targets += ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}:{node.lineno}: relative import; write the full path"
            for full in (f"{node.module}.{name.name}" for name in node.names):
                targets.append((node.lineno, full if full in MODULES or full == "torch_xla._C" else node.module))
    return [(line, target) for line, target in targets if target.split(".")[0] == "torch_xla"]


def test_imports_only_lower_layers() -> None:
    wrong = [
        f"{MODULES[module]}:{line}: {LAYERS[layer_of(module)]} imports {target} ({LAYERS[layer_of(target)]})"
        for module in MODULES
        for line, target in imports(module)
        if layer_of(target) > layer_of(module) and module != "torch_xla"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {target for _, target in imports(module)} & set(MODULES) for module in MODULES}
    while leaves := {module for module, targets in graph.items() if not targets}:
        graph = {module: targets - leaves for module, targets in graph.items() if targets}
    assert not graph, "these are on a circle, or above one"


def test_sources_include_only_lower_folders() -> None:
    root = PACKAGE / "csrc"
    sources = [path for suffix in ("h", "cpp") for path in sorted(root.rglob(f"*.{suffix}"))]
    assert {path.parent.name for path in sources} == set(CSRC)
    wrong = [
        f"{path.relative_to(root)} includes {target}"
        for path in sources
        for target in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        if CSRC.index(target.split("/")[0]) > CSRC.index(path.parent.name)
    ]
    assert not wrong, wrong


def test_only_bindings_import_the_extension() -> None:
    users = [module for module in MODULES if any(target == "torch_xla._C" for _, target in imports(module))]
    assert users == ["torch_xla._bindings"]


# What uses private parts of PyTorch where it is, and why; names of operators are none.
TORCH_ELSEWHERE = {
    "_core.torch.default_accelerator": "functions of `torch._C` are replaced",
    "_core.torch.device_lists": "a method and a function are replaced",
    "_core.torch.optimizers": "lists of devices are replaced",
    "_core.torch.import_stubs": "`torch._dynamo` has a stand-in, whose name it is",
    "_serialization": "functions are replaced, which pickles name",
    "ops.decompositions": "`torch.Tensor._make_subclass`; `as_subclass` is an operator, which modes see",
}
JAX_ELSEWHERE = {"_core.device.jax_import": "a module is named, whose import is made to change nothing"}


def test_one_module_has_the_private_parts_of_jax_and_one_those_of_torch() -> None:
    jax = r"(from|import) (jax\._src|jaxlib)|jax\._src\.|\._lowering\b"
    imported = r"^ *(from|import) torch\.[\w.]*\b_|^ *from torch(\.[\w.]+)? import [^#\n]*\b_"
    torch = rf"{imported}|\btorch\.(?!ops\b)[\w.]*\b_[a-zA-Z]"
    for room, private, elsewhere in (
        ("_jax_internals", jax, JAX_ELSEWHERE),
        ("_torch_internals", torch, TORCH_ELSEWHERE),
    ):
        users = {module for module, path in MODULES.items() if re.search(private, path.read_text(), re.MULTILINE)}
        assert users == {f"torch_xla.{module}" for module in (room, *elsewhere)}


@pytest.mark.costs("a process that imports all anew")
def test_import_starts_nothing() -> None:
    program = """
import os, socket, sys, threading
import torch
tasks = len(os.listdir("/proc/self/task"))
descriptors = set(os.listdir("/proc/self/fd"))
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
xm.mark_step()
assert xr.device_type() == "CPU", xr.device_type()
assert not {"jax", "jaxlib"} & set(sys.modules), "the import loaded jax"
assert len(os.listdir("/proc/self/task")) == tasks, "the import started a thread"
assert threading.active_count() == 1
assert set(os.listdir("/proc/self/fd")) == descriptors, "the import opened a file or a port"
"""
    python("-W", "error", "-c", program)


def test_runtime_is_reachable_from_the_package() -> None:
    import torch_xla

    assert torch_xla.runtime.device_type()
    assert tuple(map(int, torch_xla.__version__.split(".")[:2])) >= (3, 0)


@pytest.mark.parametrize("suffix", LIMITS)
def test_files_stay_readable(suffix: str) -> None:
    folders = ("torch_xla", "tests", "benchmarks", "examples")
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in folders
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }
    assert not {name: size for name, size in sizes.items() if size > LIMITS[suffix]}, "is there a second thing in them?"


def test_no_two_test_files_share_a_name() -> None:
    # Their folders are no packages, so a worker that is given both can import only one of them.
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
