"""Names with which kernels for torch_xla 2 reach JAX; here JAX runs the device, so that they have little to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch_xla._core.device import client

F = TypeVar("F", bound=Callable[..., Any])


def jax_import_guard() -> None:
    """Starts the client of the device, which is JAX's."""
    client.jax_device(0)


def requires_jax(func: F) -> F:
    """A function that uses JAX, as it is."""
    return func


@contextmanager
def jax_env_context() -> Iterator[None]:
    """A block that uses JAX."""
    yield


def maybe_get_jax(log: bool = True) -> Any:
    """JAX; `log` has no effect."""
    import jax

    return jax
