"""Binds a graph again when lowering finds that a number, an input of its program so far, must be a constant.

In `x * 0.1` the number is an input: another one takes no compile. In `x.sum(1)` it is a constant. `Graph.bind` decides,
by the `NumberPolicy` of each argument. Two findings change a policy: a rule cannot do without a constant
(`specialize`), or a graph differs from a compiled one in constants only (`Graph.constants_vary`). The graph then has
other numbers and another key; what was recorded stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch_xla import _bindings
from torch_xla._errors import GraphFailure, message
from torch_xla.ops.registry import StaticNumbers

R = TypeVar("R")
_ATTEMPTS = 1000  # each finds out about one operator at least


def with_constants(graph: _bindings.Graph, attempt: Callable[[], R]) -> R:
    """The result of `attempt`, which lowers a graph; tried again while a rule needs a number as a constant.

    The graph does not run, so that nothing is lost by a failure: its cause is raised.
    """
    for _ in range(_ATTEMPTS):
        try:
            return attempt()
        except StaticNumbers as static:
            specialize(static, graph)
        except GraphFailure as failure:
            raise failure.cause from failure.cause.__cause__
    got = f"got a rule that needs another constant after each of {_ATTEMPTS} attempts"
    raise RuntimeError(message("lower", got, do="report it"))


def specialize(static: StaticNumbers, graph: _bindings.Graph) -> None:
    """Makes the numbers that a rule needs constants, in this graph and from now on."""
    from torch_xla.ops.call import find_overload

    namespace, name, overload = static.op.split(".")
    arguments = static.arguments
    if arguments is None:
        arguments = tuple(range(len(find_overload(static.op)._schema.arguments)))
    overload = "" if overload == "default" else overload
    if not _bindings.specialize_numbers(f"{namespace}::{name}", overload, arguments):
        text = f"{static.op} needs as constants numbers that are constants already"
        raise RuntimeError(message("lower", f"got a rule: {text}", do="report it")) from static
    graph.bind()
