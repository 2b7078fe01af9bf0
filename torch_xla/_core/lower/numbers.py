"""Which numbers are inputs of a program and which are constants, as far as only lowering and compiling find out.

The recorder decides at the cut, by the `NumberPolicy` of each argument of each operator. Two findings change a policy:
a rule cannot do without a constant (`specialize`), or a graph differs from a compiled one in constants only
(`Graph.constants_vary`). The graph is then cut again, and has another key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch_xla import _bindings
from torch_xla._errors import message
from torch_xla.ops.registry import StaticNumbers

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


def specialize(static: StaticNumbers) -> None:
    """Has numbers recorded as constants from now on, which a rule found it needs so."""
    from torch_xla.ops.call import find_overload

    namespace, name, overload = static.op.split(".")
    arguments = static.arguments
    if arguments is None:
        arguments = tuple(range(len(find_overload(static.op)._schema.arguments)))
    overload = "" if overload == "default" else overload
    if not _bindings.specialize_numbers(f"{namespace}::{name}", overload, arguments):
        text = f"{static.op} asked for numbers that are constants already"
        raise RuntimeError(message("lower", f"got a rule that {text}", do="report it")) from static
