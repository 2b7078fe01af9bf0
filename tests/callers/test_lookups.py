"""Whatever the installed libraries look up in torch_xla, by import or as an attribute of what they imported, exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARIES = ["accelerate", "diffusers", "lightning_fabric", "pytorch_lightning", "torch", "transformers"]

# Name -> why it is right that it is missing.
ABSENT = {
    "torch_xla.core.xla_env_vars.HOST_ORDINAL": "Lightning reads it where the version is below 2.1",
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str, str | None]]:
    """(local name, module, name in the module or None) of every import from torch_xla."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for entry in node.names:
                if entry.name.split(".")[0] == "torch_xla":
                    yield entry.asname or "torch_xla", entry.name if entry.asname else "torch_xla", None
                    yield "", entry.name, None
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch_xla":
            for entry in node.names:
                yield entry.asname or entry.name, node.module or "", entry.name


def dotted(node: ast.AST) -> list[str]:
    """The names of ``a.b.c``, or nothing for other expressions."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (first := dotted(node.value)):
        return [*first, node.attr]
    return []


def lookups(source: str) -> set[str]:
    """Full names of what a file looks up."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    results = set()
    for local, module, name in imported(tree):
        full = f"{module}.{name}" if name else module
        results.add(full)
        if local:
            known[local] = full
    for node in ast.walk(tree):
        names = dotted(node) if isinstance(node, ast.Attribute) else []
        if names and names[0] in known:
            results.add(".".join([known[names[0]], *names[1:]]))
    return results


def resolve(full: str) -> object:
    """The object with a full name: the longest part that is a module, then attributes.

    Raises:
        AttributeError: there is none.
    """
    parts = full.split(".")
    for length in range(len(parts), 0, -1):
        try:
            result: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            result = getattr(result, part)
        return result
    raise AttributeError(full)


def missing(names: dict[str, str]) -> dict[str, str]:
    """Those of the names that do not exist."""
    results = {}
    for full, path in names.items():
        try:
            resolve(full)
        except AttributeError:
            results[full] = path
    return results


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.costs("it reads whole libraries")
def test_what_a_library_looks_up_exists(library: str) -> None:
    root = Path(importlib.util.find_spec(library).origin).parent
    asked: dict[str, str] = {}
    for path in root.rglob("*.py"):
        text = path.read_bytes()
        if b"torch_xla" in text:
            asked |= dict.fromkeys(lookups(text.decode()), str(path.relative_to(root)))
    assert asked, "nothing was found: does the library still use torch_xla?"
    assert {full: path for full, path in missing(asked).items() if full not in ABSENT} == {}


def test_what_is_missing_is_found() -> None:
    source = (
        "import torch_xla.core.xla_model as xm\nfrom torch_xla import runtime\nxm.mark_step(); runtime.nothing.at_all()"
    )
    names = lookups(source)
    assert "torch_xla.core.xla_model.mark_step" in names
    assert missing(dict.fromkeys(names, "")).keys() == {"torch_xla.runtime.nothing", "torch_xla.runtime.nothing.at_all"}
