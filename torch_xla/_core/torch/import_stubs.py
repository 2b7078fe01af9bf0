"""Spares programs the import of PyTorch's compiler and of SymPy, which take longer than JAX takes to start.

Shape functions and optimizers import them at a call: to keep the compiler out of a function, or to ask of a plain
``bool`` whether it is true. While nobody else has imported them, no function is traced and no size is symbolic, so
such an import statement gets a stand-in that can answer. It is not in ``sys.modules``: others, and whoever asks it for
more, import the module, which is loaded into the stand-in, so that both are one. An optimizer imports in each step,
which an import hook would make 20 µs longer: so the statement itself is replaced.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any, cast

import torch

from torch_xla import _bindings
from torch_xla._core.execute.untraced import skip


class _StandIn(ModuleType):
    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name)
        for attribute in ("__loader__", "__package__", "__spec__"):  # the module's, which are not known
            del self.__dict__[attribute]
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(importlib.import_module(self.__name__), name, value)


class _Loader(SourceFileLoader):
    """Loads a module into its stand-in."""

    _attributes: dict[str, object] | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stand_in = _STAND_INS[spec.name]
        self._attributes = dict(stand_in.__dict__)
        object.__setattr__(stand_in, "__class__", ModuleType)
        stand_in.__dict__.clear()
        ModuleType.__init__(stand_in, spec.name)
        return stand_in

    def exec_module(self, module: ModuleType) -> None:
        attributes, self._attributes = self._attributes, None
        try:
            super().exec_module(module)
        except BaseException:
            if attributes is not None:  # it is not reloaded
                module.__dict__.clear()
                module.__dict__.update(attributes)
                object.__setattr__(module, "__class__", _StandIn)
            raise


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _STAND_INS else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    if not isinstance(function, FunctionType) or not recursive or options != {"wrapping": False}:
        return importlib.import_module("torch._dynamo").disable(function, recursive, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    skip(function, run)
    return run


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


def install() -> None:
    """From now on PyTorch's functions get the stand-ins."""
    sys.meta_path.insert(0, _Finder)
    torch._dynamo = _STAND_INS["torch._dynamo"]  # for `import torch._dynamo`, which gives `torch`
    modules = {"torch._dynamo": torch, "sympy": _STAND_INS["sympy"]}
    _bindings.stand_in_for_torch({name: (modules.get(name), stand_in) for name, stand_in in _STAND_INS.items()})
