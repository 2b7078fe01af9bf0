"""Which numbers are inputs of a program and which are constants, as far as only lowering and compiling find out.

The recorder decides at the cut, by the `NumberPolicy` of each argument of each operator. Three findings change a
policy: a rule wants a constant (`take_wanted`), a rule cannot do without one (`specialize`), or a graph differs from a
compiled one in constants only (`compare`). The graph is then cut again, and has another key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from torch_xla import _bindings
from torch_xla._errors import message
from torch_xla.ops.registry import StaticNumbers, wanted_constants

R = TypeVar("R")


_ROUNDS = 1000  # each finds out about one operator at least


def settled(attempt: Callable[[], R]) -> R:
    """What `attempt`, which cuts and lowers a graph, gives; made again as long as it finds numbers to be constants."""
    for _ in range(_ROUNDS):
        try:
            return attempt()
        except StaticNumbers as static:
            specialize(static)
    raise RuntimeError(message("lower", f"got a graph whose numbers differ after {_ROUNDS} cuts", do="report it"))


def specialize(static: StaticNumbers) -> bool:
    """Has numbers recorded as constants from now on, which a rule found it needs so; True."""
    if not _demote(static.op, static.arguments):
        text = f"{static.op} asked for numbers that are constants already"
        raise RuntimeError(message("lower", f"got a rule that {text}", do="report it")) from static
    return True


def compare(cut: _bindings.Graph) -> bool:
    """Compares a graph that has no program yet with those that have one; says whether it is to be cut again.

    It is where it differs from one in constants alone, which are inputs from now on where that is possible.
    """
    return cut.constants_vary()


def take_wanted() -> bool:
    """Has recorded as constants what rules want so, once the rules are imported; whether that was not known yet."""
    return _take_wanted.cache_info().currsize == 0 and _take_wanted()


@functools.cache
def _take_wanted() -> bool:
    from torch_xla.ops.call import find_overload, load_rules

    load_rules()
    changed = False
    for op, names in wanted_constants().items():
        places = tuple(i for i, a in enumerate(find_overload(op)._schema.arguments) if a.name in names)
        changed = _demote(op, places) or changed
    return changed


def _demote(op: str, arguments: tuple[int, ...] | None) -> bool:
    """Has arguments of an operator, all if none are named, recorded as constants. Whether that changes anything."""
    from torch_xla.ops.call import find_overload

    namespace, name, overload = op.split(".")
    if arguments is None:
        arguments = tuple(range(len(find_overload(op)._schema.arguments)))
    return _bindings.specialize_numbers(f"{namespace}::{name}", "" if overload == "default" else overload, arguments)
