"""Lists the settings of the process that a program depends on; all caches of programs have them in their keys."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter

from torch_xla import _bindings, _config, _jax_internals
from torch_xla._core.compile import options
from torch_xla._core.device import client, shardings
from torch_xla._core.lower import scopes
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


def program_settings() -> tuple[Hashable, ...]:
    """The settings that a program depends on beside its graph; read at every barrier."""
    return (
        precision.current(),
        client.spmd(),
        shardings.changes(),
        scopes.on(),
        *_bindings.number_types(),
        dtypes.shortens(),
        _config.XLA_ROLL_LAYERS.get(),
        tuple((name, type(value), value) for name, value in options.custom()),  # True equals 1
        *map(_value, _COMPILING),
        _jax_internals.trace_context(),
    )


def process_settings() -> tuple[Hashable, ...]:
    """`program_settings` with those that are read when a call is recorded, for programs without a recorded graph."""
    return _bindings.call_settings(), *program_settings()
