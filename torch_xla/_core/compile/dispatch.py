"""Makes the function by which C++ starts a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax

from torch_xla import _jax_internals
from torch_xla._core.device import buffers, placement
from torch_xla._events import NOTHING
from torch_xla.ops import dtypes
from torch_xla.ops.registry import Meta


def starter(
    loaded: Any, results: Sequence[Meta], device: int, places: Sequence[int]
) -> Callable[..., tuple[Any, ...] | None]:
    """A function that starts a program, whose results have these shapes and dtypes, and these placement numbers.

    It takes buffers and gives buffers, as `arrays.starter` says.
    """
    place = placement.of(device)
    shardings = [place.at(number, meta.shape) for number, meta in zip(places, results, strict=True)]
    avals = [
        jax.core.ShapedArray(place.buffer_shape(number, meta.shape), dtypes.numpy_dtype(meta.dtype))
        for number, meta in zip(places, results, strict=True)
    ]
    return buffers.kind().starter(loaded, avals, shardings)


def debug_checks_on() -> bool:
    """Whether one of JAX's debugging switches is on that would reach our programs.

    Without its jit they would not start; its search for NaN would raise when their inputs are gone.
    """
    switches = _jax_internals.config
    return bool(switches.disable_jit.value or switches.debug_nans.value or switches.debug_infs.value)


def debug_checks_off() -> AbstractContextManager[Any]:
    """A scope in which they do not."""
    if not debug_checks_on():
        return NOTHING
    scope = ExitStack()
    for switch in (jax.disable_jit, jax.debug_nans, jax.debug_infs):
        scope.enter_context(switch(False))
    return scope
