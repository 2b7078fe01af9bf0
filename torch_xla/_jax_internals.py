"""All that this package takes of JAX that JAX does not promise to keep, in one place.

A JAX without what starting a program and placing its inputs need is refused in one line with its version, where the
first tensor is made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from torch_xla._errors import message

try:
    from jax._src import config, distributed, profiler
    from jax._src.compiler import _DISABLE_MOST_OPTIMIZATIONS
    from jax._src.interpreters.pxla import (
        JitGlobalCppCacheKeys,
        MeshExecutableFastpathData,
        batched_device_put,
        cc_shard_arg,
    )
    from jax._src.tree_util import dispatch_registry
    from jaxlib import _hlo, _jax, lapack, xla_client  # type: ignore[attr-defined]

    pjit = _jax.pjit
    _context: Callable[[], tuple[Any, ...]] = config.trace_context
    _context_names: tuple[str, ...] = config.trace_context_names()
    ArrayImpl: Any = _jax.ArrayImpl
    mlir: Any = _jax.mlir
    HloPrintOptions: Any = _hlo.HloPrintOptions
    job_state: Any = distributed.global_state  # JAX's own connection between processes
except (AttributeError, ImportError) as error:
    raise ImportError(
        message("jax", f"got version {jax.__version__} ({error})", expected="0.10 to 0.12", do="install one of these")
    ) from error

__all__ = [
    "ArrayImpl",
    "HloPrintOptions",
    "JitGlobalCppCacheKeys",
    "MeshExecutableFastpathData",
    "as_rules_want",
    "batched_device_put",
    "cc_shard_arg",
    "config",
    "dispatch_registry",
    "job_state",
    "lapack",
    "mlir",
    "pjit",
    "states",
    "trace_context",
    "xla_client",
]


# What lowering sets itself, whatever the user's own JAX code wants.
_OWN = frozenset(
    f"jax_{name}"
    for name in ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "numpy_rank_promotion")
)
_others = operator.itemgetter(*(i for i, name in enumerate(_context_names) if name not in _OWN))


def trace_context() -> tuple[Any, ...]:
    """What else JAX reads when it traces, as JAX lists it."""
    others: tuple[Any, ...] = _others(_context())
    return others


@contextmanager
def as_rules_want(precision: str) -> Iterator[None]:
    """A scope for lowering, with types of 64 bits and NumPy's promotion.

    Args:
        precision: Name of the level at which products are computed.
    """
    with (
        jax.enable_x64(True),
        jax.default_matmul_precision(precision),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def states(*names: str) -> list[Any]:
    """Settings of JAX by name, of which each `value` is that in force; without those that its version does not have."""
    known = config.config_states | {"jax_disable_most_optimizations": _DISABLE_MOST_OPTIMIZATIONS}
    return [known[name] for name in names if name in known]


def forget_trace() -> None:
    """Lets JAX forget a trace that it could not write; it would refuse every later one."""
    profiler._profile_state.reset()


def compile_arguments(stage: jax.stages.Lowered) -> dict[str, Any]:
    """What JAX compiles a lowered program with."""
    return stage._lowering.compile_args


def constants(stage: jax.stages.Lowered) -> Any:
    """The values of a lowered program that are not part of its module, as they are large."""
    return stage._lowering.const_args
