"""Spares programs PyTorch's compiler and symbolic sizes, which take longer to import than JAX takes to start.

Shape functions and optimizers import them when they are called: to keep the compiler out of a function, and to ask of
a plain ``bool`` whether it is true. While nobody else has imported them, no function is traced and no size is symbolic,
and such an import statement gets a stand-in that knows as much. It is not entered in ``sys.modules``: all others, and
whoever asks it for more, get the module itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import torch

from torch_xla._core.untraced import untraced


class _StandIn(ModuleType):
    def __init__(self, name: str, **known: object) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def _disable(function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
    if not recursive:
        return importlib.import_module("torch._dynamo").disable(function, recursive, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return untraced(run)


def _of_plain(name: str, function: Callable[..., Any], types: tuple[type, ...]) -> Callable[..., Any]:
    """A function of symbolic sizes, as it is for values of these types; the function itself has the others."""

    def is_plain(value: object) -> bool:
        kind = type(value)
        return kind in types and (kind not in _LISTS or all(map(is_plain, cast(Sequence[object], value))))

    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not all(map(is_plain, args)):
            return getattr(importlib.import_module(_SYMBOLS), name)(*args, **kwargs)
        return function(*args)

    return checked


def _same(value: Any) -> Any:
    return value


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_equal, x, y))
    if isinstance(x, (tuple, list)) or isinstance(y, (tuple, list)):
        raise AssertionError(f"unexpected sym_eq between {type(x)} {type(y)}")
    return bool(x == y)


_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_LISTS = (tuple, list, torch.Size)
_PLAIN: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {
    "expect_true": (_same, (bool,)),
    "free_unbacked_symbols": (lambda _sizes: set(), (int, torch.Tensor, *_LISTS)),
    "guard_int": (_same, (int,)),
    "guard_or_false": (_same, (bool,)),
    "guard_or_true": (_same, (bool,)),
    "guard_size_oblivious": (_same, ()),  # it warns
    "guarding_hint_or_throw": (_same, (int, bool)),
    "has_guarding_hint": (lambda _size: True, (int, bool)),
    "is_nested_int": (lambda _size: False, (int,)),
    "statically_known_true": (_same, (bool,)),
    "sym_and": (lambda *conditions: all(conditions), (bool,)),
    "sym_eq": (_equal, (int, bool, *_LISTS)),
    "sym_or": (lambda *conditions: any(conditions), (bool,)),
}

_STAND_INS = {
    stand_in.__name__: stand_in
    for stand_in in (
        _StandIn("torch._dynamo", disable=_disable, graph_break=lambda: None),
        _StandIn(_SYMBOLS, **{name: _of_plain(name, *plain) for name, plain in _PLAIN.items()}),
        _StandIn("sympy", Basic=type("Basic", (), {})),
    )
}


def _asks_torch(module: str) -> bool:
    """Whether the import statement that is being carried out is for this module and in a function of PyTorch's."""
    frame, asked = sys._getframe(2), None
    while frame.f_globals.get("__name__") == "importlib._bootstrap" and frame.f_back is not None:
        asked = frame.f_locals.get("name", asked)  # at last the whole name: a parent is imported for its child
        frame = frame.f_back
    inside = frame.f_code.co_name != "<module>"
    return inside and asked == module and frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _STAND_INS or not _asks_torch(fullname):
            return None
        return ModuleSpec(f"{__name__}.{fullname}", self)  # the name under which `sys.modules` will have it

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _STAND_INS[spec.name.removeprefix(f"{__name__}.")]

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """From now on PyTorch's functions get the stand-ins."""
    sys.meta_path.insert(0, _Finder())
