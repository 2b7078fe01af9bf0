"""All that this package takes of JAX that JAX does not promise to keep, in one place.

A JAX without what starting a program and placing its inputs need is refused in one line with its version, where the
first tensor is made.
"""

from __future__ import annotations

from typing import Any

import jax

from torch_xla._errors import message

try:
    from jax._src import config, distributed, profiler
    from jax._src.interpreters.pxla import (
        JitGlobalCppCacheKeys,
        MeshExecutableFastpathData,
        batched_device_put,
        cc_shard_arg,
    )
    from jax._src.tree_util import dispatch_registry
    from jaxlib import _hlo, _jax, lapack, xla_client  # type: ignore[attr-defined]

    pjit = _jax.pjit
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
    "batched_device_put",
    "cc_shard_arg",
    "config",
    "dispatch_registry",
    "job_state",
    "lapack",
    "mlir",
    "pjit",
    "xla_client",
]


def forget_trace() -> None:
    """Lets JAX forget a trace that it could not write; it would refuse every later one."""
    profiler._profile_state.reset()


def compile_arguments(stage: jax.stages.Lowered) -> dict[str, Any]:
    """What JAX compiles a lowered program with."""
    return stage._lowering.compile_args


def constants(stage: jax.stages.Lowered) -> Any:
    """The values of a lowered program that are not part of its module, as they are large."""
    return stage._lowering.const_args
