"""Lists the settings of the process that a program depends on; all caches of programs have them in their keys."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from operator import attrgetter

from torch_xla import _bindings, _config, _jax_internals
from torch_xla._core.device import client, shardings
from torch_xla._core.lower import scopes
from torch_xla._errors import message
from torch_xla.ops import dtypes, precision

_value = attrgetter("value")

# What JAX reads when it compiles. What it reads when it traces it lists itself.
_COMPILING = _jax_internals.states(
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
)

Options = tuple[tuple[str, str | int | float], ...]  # of the device's compiler, in the user's order

_process_options: Options = ()
_region_options: ContextVar[Options | None] = ContextVar("options of a region's compiler", default=None)


def custom_options() -> Options:
    """What the user asks of the device's compiler: in a region that has options these, else the process's."""
    own = _region_options.get()
    return _process_options if own is None else own


def set_custom_options(options: Mapping[str, str | int | float]) -> None:
    """Sets the process's; TypeError where they are not text, numbers and booleans by name."""
    global _process_options
    _process_options = checked_options(options)


def with_options(options: Options) -> AbstractContextManager[None]:
    """A scope, in this thread, with other options."""
    return _config.within(_region_options, options)


def checked_options(options: Mapping[str, str | int | float]) -> Options:
    """A user's options as they are kept; TypeError as `set_custom_options`."""
    if not isinstance(options, Mapping) or not all(
        isinstance(name, str) and isinstance(value, (str, int, float)) for name, value in options.items()
    ):
        raise TypeError(
            message("compile", f"got options {options!r}", expected="a dict of text, numbers and booleans by name")
        )
    return tuple(options.items())


def program_settings() -> tuple[Hashable, ...]:
    """The settings that a program depends on beside its graph; read at every barrier."""
    return (
        precision.current(),
        client.spmd(),
        shardings.changes(),
        scopes.on(),
        dtypes.shortens(),
        _config.XLA_ROLL_LAYERS.get(),
        tuple((name, type(value), value) for name, value in custom_options()),  # True equals 1
        *map(_value, _COMPILING),
        _jax_internals.trace_context(),
    )


def process_settings() -> tuple[Hashable, ...]:
    """`program_settings` with those that are read when a call is recorded, for programs without a recorded graph."""
    return _bindings.call_settings(), *program_settings()
