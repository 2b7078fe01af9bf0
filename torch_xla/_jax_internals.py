"""Has all private parts of JAX that this package uses; a JAX without them is refused in one line with its version."""

from __future__ import annotations

import ctypes
import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

from torch_xla._errors import message

try:
    # `jax.extend` has some of these too, but imports Pallas with them.
    from jax._src import config, distributed, profiler, source_info_util, xla_bridge
    from jax._src.compiler import _DISABLE_MOST_OPTIMIZATIONS
    from jax._src.core import Primitive, jaxpr_as_fun
    from jax._src.interpreters.pxla import (
        JitGlobalCppCacheKeys,
        MeshExecutableFastpathData,
        batched_device_put,
        cc_shard_arg,
    )
    from jax._src.jaxpr_util import all_eqns
    from jax._src.tree_util import dispatch_registry
    from jaxlib import _hlo, _jax, lapack, xla_client  # type: ignore[attr-defined]
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func, sdy, stablehlo
    from jaxlib.mlir.passmanager import PassManager

    pjit = _jax.pjit
    _context: Callable[[], tuple[Any, ...]] = config.trace_context
    _context_names: tuple[str, ...] = config.trace_context_names()
    ArrayImpl: Any = _jax.ArrayImpl
    mlir: Any = _jax.mlir
    HloPrintOptions: Any = _hlo.HloPrintOptions
    _find_plugins: Callable[[], None] = xla_bridge._discover_and_register_pjrt_plugins
    _platforms: dict[str, Any] = xla_bridge._backend_factories
    job_state: Any = distributed.global_state  # JAX's own connection between processes
except (AttributeError, ImportError) as error:
    raise ImportError(
        message("jax", f"got version {jax.__version__} ({error})", expected="0.10.2 to 0.12", do="install one of these")
    ) from error

__all__ = [
    "ArrayImpl",
    "HloPrintOptions",
    "JitGlobalCppCacheKeys",
    "MeshExecutableFastpathData",
    "PassManager",
    "Primitive",
    "all_eqns",
    "as_rules_want",
    "batched_device_put",
    "cc_shard_arg",
    "config",
    "dispatch_registry",
    "func",
    "ir",
    "jaxpr_as_fun",
    "job_state",
    "lapack",
    "mlir",
    "pjit",
    "sdy",
    "source_info_util",
    "stablehlo",
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
    """JAX's list of the settings that tracing depends on."""
    others: tuple[Any, ...] = _others(_context())
    return others


@contextmanager
def as_rules_want(precision: str) -> Iterator[None]:
    """A scope for lowering, with types of 64 bits and NumPy's promotion.

    Products are computed at a level of precision.
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
    config_states = config.config_states | {"jax_disable_most_optimizations": _DISABLE_MOST_OPTIMIZATIONS}
    return [config_states[name] for name in names if name in config_states]


def forget_trace() -> None:
    """Lets JAX forget a trace that it could not write; it would refuse every later one."""
    profiler._profile_state.reset()


def compile_arguments(stage: jax.stages.Lowered) -> dict[str, Any]:
    """JAX's arguments for compiling a lowered program."""
    return stage._lowering.compile_args


def constants(stage: jax.stages.Lowered) -> Any:
    """The values of a lowered program that are not part of its module, as they are large."""
    return stage._lowering.const_args


def find_plugins(module: str | None) -> BaseException | None:
    """Lets JAX find its plugins, as it does before it starts its clients.

    Gives what one raised, which JAX only logs.
    """
    raised: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        is_load_failure = (
            module is not None and isinstance(record.args, tuple) and module in record.args and record.exc_info
        )
        if is_load_failure and record.exc_info and record.exc_info[1] is not None:
            raised.append(record.exc_info[1])
        return not is_load_failure

    xla_bridge.logger.addFilter(keep)
    try:
        _find_plugins()
    finally:
        xla_bridge.logger.removeFilter(keep)
    return raised[0] if raised else None


def clients_run() -> bool:
    """Whether JAX has started its clients: it takes no further plugins then."""
    return xla_bridge.backends_are_initialized()


def register_plugin(name: str, library: str, options: dict[str, Any]) -> None:
    """Registers a library's client with JAX, or gives options to one that JAX found itself.

    Raises RuntimeError where JAX found another library under that name.
    """
    if name not in _platforms:
        xla_bridge.register_plugin(name, library_path=library, options=options)
        return
    find = ctypes.CDLL(library).GetPjrtApi  # of a library that is loaded already, if it is the same
    find.restype = ctypes.c_void_p
    if find() != plugin_apis().get(name):
        raise RuntimeError(f"JAX found another library under the name {name!r}")
    _platforms[name].factory = partial(xla_bridge.make_pjrt_c_api_client, name, options=options)


def refuse_plugin(name: str, error: Exception) -> None:
    """Makes JAX raise this error instead of starting the client of a plugin."""

    def client() -> None:
        raise error

    _platforms[name].factory = client


def plugin_apis() -> dict[str, int]:
    """The plugins that JAX knows, with the address of each one's `PJRT_Api`."""
    return {
        name: _address(registration.c_api)
        for name, registration in _platforms.items()
        if registration.c_api is not None
    }


def client_options(name: str) -> dict[str, Any]:
    """The options that a plugin's client is made with."""
    options = getattr(_platforms[name].factory, "keywords", {}).get("options")
    return {**((options() if callable(options) else options) or {}), **xla_bridge._options_from_jax_configs(name)}


def _address(capsule: Any) -> int:
    python = ctypes.pythonapi
    python.PyCapsule_GetName.restype, python.PyCapsule_GetPointer.restype = ctypes.c_char_p, ctypes.c_void_p
    label = ctypes.c_char_p(python.PyCapsule_GetName(ctypes.py_object(capsule)))
    address: int = python.PyCapsule_GetPointer(ctypes.py_object(capsule), label)
    return address
