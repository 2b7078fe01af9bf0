"""Which part of Python a step depends on: what `_bindings.Guards` visits, from the step's function on.

Code of the user's is read: the variables of its closures, the globals and attributes that it names, and so on from
their values. Libraries are trusted to compute from what they are given: of theirs only data is visited, such as the
parameters of a module or the groups of an optimizer.
"""

from __future__ import annotations

import collections
import datetime
import dis
import enum
import functools
import io
import logging
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as _modules
from torch.optim import optimizer as _optimizers

from torch_xla import _bindings

_LARGEST = 1 << 16  # bytes of a host tensor that are compared
_LIBRARIES = (sys.stdlib_module_names | {"torch", "torch_xla", "torchvision", "numpy", "jax", "jaxlib"}) - {"test"}
# With these, code reads attributes that it does not name.
_DYNAMIC = {"getattr", "vars", "__dict__", "eval", "exec", "globals", "locals", "attrgetter"}

# As csrc/bindings/guards.cpp numbers them.
_VALUE, _SAME, _TENSOR, _ARRAY, _FUNCTION, _CELL, _MODULE, _CLASS, _OBJECT, _OPAQUE = range(10)
_NO_ENTRIES, _NAMED, _ALL = range(3)
_NO_CONTENTS, _ITEMS, _PAIRS, _REFERENT = range(4)
Kind = tuple[int, int, int, tuple[str, ...]]

_VALUES: tuple[type, ...] = (
    *(
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        type(...),
        type(NotImplemented),
        range,
        slice,
        enum.Enum,
        np.generic,
    ),
    *(np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, re.Pattern, PurePath),
    *(Decimal, Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)
# Where Python's or the C library's own state is, which nothing shows.
_STATEFUL = (io.IOBase, random.Random, torch.Generator, Iterator, types.CoroutineType, memoryview)
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__", "__name__"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
_IDENTITIES: tuple[type, ...] = (
    *(types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType, types.GenericAlias),
    *(logging.Logger, logging.Handler),
)


def names() -> set[str]:
    """Attributes that count although no code of the user's names them."""
    return {"forward", "backward", "setup_context", "jvp", "vmap"}


def trusts(x: Any) -> bool:
    """Whether a class or a module is a library's."""
    name = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def read_by(code: types.CodeType, variables: dict[str, Any], known: set[str]) -> tuple[tuple[str, ...], ...] | None:
    """The globals that code reads, and modules that it imports; None for a library's.

    Args:
        code: The code.
        variables: Its globals.
        known: Gets the attributes that it names.
    """
    if str(variables.get("__name__")).partition(".")[0] in _LIBRARIES:
        return None
    found: dict[str, None] = {}
    modules: dict[str, None] = {}
    for part in _parts(code):
        known.update(part.co_names)
        known.update(x for x in part.co_consts if isinstance(x, str) and x.isidentifier())
        if not _DYNAMIC.isdisjoint(part.co_names):
            known.add("*")
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found[instruction.argval] = None
            elif instruction.opname == "IMPORT_NAME":
                modules[instruction.argval] = None
    return tuple(found), tuple(modules)


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _parts(x)


def kind_of(t: type, known: set[str]) -> Kind:
    """How instances of a class are compared.

    Args:
        t: The class.
        known: Gets the attributes that libraries' classes which it extends name.
    """
    slots = tuple(dict.fromkeys(name for base in t.__mro__ for name in _slots(base)))
    if issubclass(t, torch.Tensor):
        return _TENSOR, _NAMED if t in (torch.Tensor, torch.nn.Parameter) else _ALL, _NO_CONTENTS, slots
    if issubclass(t, np.ndarray):
        return _ARRAY, _NO_ENTRIES, _NO_CONTENTS, ()
    simple = {types.FunctionType: _FUNCTION, types.CellType: _CELL}.get(t)
    if simple is not None:
        return simple, _NO_ENTRIES, _NO_CONTENTS, ()
    families: list[tuple[tuple[type, ...], int]]
    families = [((types.ModuleType,), _MODULE), ((type,), _CLASS), (_VALUES, _VALUE), (_IDENTITIES, _SAME)]
    for family, what in families:
        if issubclass(t, family):
            return what, _NO_ENTRIES, _NO_CONTENTS, ()
    if t in _ATTRIBUTES:
        return _OBJECT, _NO_ENTRIES, _NO_CONTENTS, _ATTRIBUTES[t]
    if issubclass(t, _STATEFUL) or t.__module__.startswith("numpy.random"):
        return _OPAQUE, _NO_ENTRIES, _NO_CONTENTS, ()
    contents = _NO_CONTENTS
    if issubclass(t, (list, tuple, set, frozenset, collections.deque)):
        contents = _ITEMS
    elif issubclass(t, dict):
        contents = _PAIRS
    elif issubclass(t, weakref.ref):
        contents = _REFERENT
    has_entries = t.__dictoffset__ != 0
    if trusts(t):
        if not contents and (not has_entries or (_is_called(t) and not issubclass(t, torch.nn.Module))):
            return _SAME, _NO_ENTRIES, _NO_CONTENTS, ()
        return _OBJECT, _ALL if has_entries else _NO_ENTRIES, contents, ()
    for parent in t.__mro__:
        if parent is not object and trusts(parent):
            for function in vars(parent).values():
                if isinstance(function, types.FunctionType):
                    known.update(function.__code__.co_names)
    if not (has_entries or contents or slots):
        return (_SAME if _is_empty(t) else _OPAQUE), _NO_ENTRIES, _NO_CONTENTS, ()
    return _OBJECT, _NAMED if has_entries else _NO_ENTRIES, contents, slots


def _slots(base: type) -> tuple[str, ...]:
    given = vars(base).get("__slots__", ())
    listed = (given,) if isinstance(given, str) else tuple(given)
    return tuple(name for name in listed if name not in ("__dict__", "__weakref__"))


def _is_called(t: type) -> bool:
    return any("__call__" in vars(base) for base in t.__mro__)


def _is_empty(t: type) -> bool:
    return t.__basicsize__ <= object.__basicsize__


def contents(x: Any) -> tuple[Any, ...] | None:
    """What is in a host tensor or an array, if that is little."""
    array = x.detach().resolve_conj().resolve_neg().contiguous() if isinstance(x, torch.Tensor) else x
    if array.nbytes > _LARGEST:
        return None
    if isinstance(array, torch.Tensor):
        return array.dtype, tuple(x.shape), x.stride(), array.reshape(-1).view(torch.uint8).numpy().tobytes()
    return (array.dtype.str, array.shape, array.tobytes()) if array.dtype != object else None


def _hooks() -> list[tuple[str, Any]]:
    """The hooks of all modules and optimizers."""
    return [(name, x) for m in (_modules, _optimizers) for name, x in vars(m).items() if name.startswith("_global_")]


def guards_of(function: Callable[..., Any], name: str) -> _bindings.Guards:
    """What a step sees of Python now."""
    return _bindings.Guards(sys.modules[__name__], [(name, function), *_hooks()])
