"""Sets the recorder up, once, at import, without a client, a thread or JAX."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from torch_xla import _bindings, _config, _metrics
from torch_xla._core.device import client, jax_import
from torch_xla._core.execute import hooks
from torch_xla._core.functions import collectives, ctc_operator, custom_calls, jax_functions, manual_computation
from torch_xla._core.lower import composites, scopes
from torch_xla._core.report import debug_level
from torch_xla._core.torch import device_lists, fake_devices, import_stubs
from torch_xla._torch_internals import has_kernel
from torch_xla.ops import undecomposed

_STACK = 8  # frames that XLA_IR_DEBUG keeps of every operator
_registered: list[torch.library.Library] = []


def _contiguous_like(place: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(args[place].shape, dtype=args[place].dtype, device="meta")


def _each_like(places: tuple[int, ...], *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if args[i] is None else torch.empty_like(args[i]) for i in places)


def _rnn(
    x: torch.Tensor,
    state: list[torch.Tensor],
    weights: list[torch.Tensor],
    batch_sizes: torch.Tensor | None,
    mask: torch.Tensor | None,
    mode: str,
    biases: bool,
    layers: int,
    bidirectional: bool,
) -> list[torch.Tensor]:
    """Output, states, and what the backward needs: per layer and direction the states after each step."""
    directions = 1 + bidirectional
    out = x.new_empty((*x.shape[:-1], state[0].shape[2] * directions))
    steps = len(x if batch_sizes is None else batch_sizes)
    after = [x.new_empty((steps, *s.shape[1:])) for _ in range(layers * directions) for s in state]
    return [out, *_like(*state), *after]


def _like(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t in tensors]


def _register_meta_kernels() -> None:
    """Registers Meta kernels for operators that PyTorch has none for; without one they would run on the host."""
    library = torch.library.Library("aten", "IMPL", "Meta")

    def register(name: str, kernel: Callable[..., Any]) -> None:
        if not has_kernel(f"aten::{name}", "Meta"):
            library.impl(name, kernel)

    for name, place in undecomposed.SHAPED_LIKE.items():
        register(name, functools.partial(_contiguous_like, place))
    for name, places in undecomposed.EACH_LIKE.items():
        register(name, functools.partial(_each_like, places))
    layers = torch.library.Library("torch_xla", "IMPL", "Meta")
    layers.impl("rnn", _rnn)
    layers.impl("rnn_backward", lambda grads, x, state, weights, *rest: _like(x, *state, *weights))
    layers.impl(
        "rnn_double_backward", lambda second, grads, x, state, weights, *rest: _like(*grads, x, *state, *weights)
    )
    _registered.extend((library, layers))


def install() -> None:
    """Registers device ``xla`` with its operators and connects the pipeline."""
    import_stubs.install()
    jax_import.install()
    hooks.install()
    jax_functions.install()
    collectives.install()
    manual_computation.install()
    custom_calls.install()
    composites.install()
    ctc_operator.install()
    fake_devices.install()
    device_lists.install()
    _register_meta_kernels()
    _bindings.record_undecomposed(undecomposed.names())
    _bindings.keep_on_host([f"aten::{name}" for name in undecomposed.HOST_ONLY + undecomposed.ASSERTS])
    _bindings.check_errors({f"aten::{op}": name for op, name in undecomposed.CHECKED.items()})
    _bindings.refuse_packing([f"aten::{name}" for name in undecomposed.PACKED_ON_HOST])
    every = range(8)  # or as many as an operator has
    constants = {name: range(place, place + 1) for name, place in undecomposed.CONSTANTS.items()}
    for operator, places in (constants | dict.fromkeys(undecomposed.DECOMPOSED, every)).items():
        name, _, overload = operator.partition(".")
        _bindings.specialize_numbers(f"aten::{name}", overload, places)
    _bindings.set_special_numbers(not _config.XLA_NO_SPECIAL_SCALARS.get())
    _bindings.set_frame_depth(
        _STACK if _config.XLA_IR_DEBUG.get() else int(_config.XLA_NOTICES.get() != "none" or scopes.on())
    )
    # A user's line is one outside PyTorch, JAX, this package and the standard library.
    torch_folder, xla_folder = (os.path.dirname(file) for file in (torch.__file__, _config.__file__))
    packages = os.path.dirname(torch_folder)
    for folder in (torch_folder, xla_folder, os.path.dirname(os.__file__), f"{packages}/jax", f"{packages}/jaxlib"):
        _bindings.add_skipped_prefix(folder + os.sep)
    _metrics.provide_group(lambda: {f"xla::{name}": calls for name, calls in _bindings.op_counts().items()})
    scopes.install()
    atexit.register(debug_level.at_exit)
    _metrics.provide("CreateXlaTensor", _bindings.created_tensors)
    _metrics.provide("DestroyXlaTensor", _bindings.destroyed_tensors)
    client.publish_count()
