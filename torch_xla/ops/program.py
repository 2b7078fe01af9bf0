"""Rule of `xla::program`: a JAX function as one operator, called by the name it was registered under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from torch_xla.ops.registry import Context, Meta, lowers


@dataclass(frozen=True)
class TracedProgram:
    """A JAX function, from arrays one by one to a sequence of arrays, traced for certain shapes and dtypes."""

    function: Callable[..., Any]
    inputs: tuple[Meta, ...]
    outs: tuple[Meta, ...]


# For ever: a recorded call holds nothing but the name.
_programs: dict[str, TracedProgram] = {}


def register(name: str, program: TracedProgram) -> None:
    """Makes a program callable as ``torch.ops.xla.program(inputs, name)``; the name must be made from its content."""
    _programs.setdefault(name, program)


def find(name: str) -> TracedProgram:
    """The program registered under a name."""
    return _programs[name]


@lowers("xla.program.default")
def _program(ctx: Context, inputs: list[jax.Array], name: str) -> Any:
    return tuple(_programs[name].function(*inputs))
