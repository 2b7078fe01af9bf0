"""Keeps a process as it is where JAX is imported, and its clients start.

A module of JAX's clusters draws from numpy's global random numbers when it is imported, and JAX writes environment
variables for the libraries of its devices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_written: dict[str, tuple[str | None, str | None]] = {}  # what a variable was, and what JAX made it


@contextmanager
def _numbers_kept() -> Iterator[None]:
    import numpy as np

    state = np.random.get_state(legacy=False)
    try:
        yield
    finally:
        np.random.set_state(state)


@contextmanager
def _variables_noted() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in before.keys() | os.environ.keys():
            if before.get(name) != os.environ.get(name):
                _written[name] = before.get(name), os.environ.get(name)


def restore_variables() -> None:
    """Takes JAX's variables out of the environment; called once clients have started, whose libraries read them."""
    for name, (before, after) in _written.items():
        if os.environ.get(name) != after:
            continue  # the program's own by now
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    _written.clear()


# The module that draws alone: what other threads draw meanwhile would come twice.
_SCOPES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "jax": _variables_noted,
    "jax._src.clusters.k8s_cluster": _numbers_kept,
}


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        scope = _SCOPES.get(name)
        spec = PathFinder.find_spec(name, path, target) if scope is not None else None
        if scope is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with scope():
                execute(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """From now on an import of JAX, whoever asks for it, leaves the process as it was."""
    sys.meta_path.insert(0, _Finder)
