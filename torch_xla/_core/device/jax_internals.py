"""What starting a program and placing its inputs take of JAX that JAX does not promise to keep, in one place.

A JAX without it is refused in one line with its version, where the first tensor is made. What shows a module's text and
what profiles have their own uses of such parts, which not every program needs.
"""

from __future__ import annotations

from typing import Any

import jax

from torch_xla._errors import message

try:
    from jax._src import config
    from jax._src.interpreters.pxla import (
        JitGlobalCppCacheKeys,
        MeshExecutableFastpathData,
        batched_device_put,
        cc_shard_arg,
    )
    from jax._src.tree_util import dispatch_registry
    from jaxlib import _jax

    pjit = _jax.pjit
    ArrayImpl: Any = _jax.ArrayImpl
except (AttributeError, ImportError) as error:
    raise ImportError(
        message("jax", f"got version {jax.__version__} ({error})", expected="0.10 to 0.12", do="install one of these")
    ) from error

__all__ = [
    "ArrayImpl",
    "JitGlobalCppCacheKeys",
    "MeshExecutableFastpathData",
    "batched_device_put",
    "cc_shard_arg",
    "config",
    "dispatch_registry",
    "pjit",
]
