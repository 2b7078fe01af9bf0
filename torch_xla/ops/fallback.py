"""Operators with neither rule nor decomposition: PyTorch's CPU kernel, called from inside the compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import torch

from torch_xla import _config, _fallbacks
from torch_xla._torch_internals import OpOverload, pytree
from torch_xla.ops import call_settings, dtypes
from torch_xla.ops.promotion import promoted_arrays
from torch_xla.ops.registry import Meta, NumberInput, has_own_text

_interrupt: BaseException | None = None  # raised in a callback
_can_call: ContextVar[Callable[[], bool] | None] = ContextVar("programs can call the host", default=None)


class NeedsHost(Exception):
    """The host computes an operator `op`, which programs of the device cannot call, for a `reason`.

    `node` may be known.
    """

    node: Any = None

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(op, reason)
        self.op = op
        self.reason = reason


def where(can_call: Callable[[], bool] | None) -> AbstractContextManager[None]:
    """A scope in which programs are lowered for a device whose programs can call the host, or not.

    `can_call` tells that, and is asked where there is something to call; None where it does not matter.
    """
    return _config.within(_can_call, can_call)


def callback_policy() -> Callable[[], bool] | None:
    """The function of this scope that says whether callbacks work; part of a lowered operator's key."""
    return _can_call.get()


def take_interrupt() -> BaseException | None:
    """The interrupt or exit that a callback raised since the last call, or None."""
    global _interrupt
    interrupt, _interrupt = _interrupt, None
    return interrupt


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's values as a NumPy array of the XLA dtype; shares memory where it can."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    target = dtypes.numpy_dtype(tensor.dtype)
    if target.isbuiltin != 1:  # NumPy knows bfloat16 and the 8-bit floats through ml_dtypes, PyTorch does not
        width = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(width).numpy().view(target)
    values = tensor.numpy()
    return values if values.dtype == target else values.clip(*dtypes.limits(target)).astype(target)


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of that dtype with a copy of the array's values."""
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)  # NumPy's strides are 0 then
    array = np.array(array, order="C", copy=True)
    if array.dtype.isbuiltin != 1:
        width = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(array.view(width)).view(dtype)
    return torch.from_numpy(array).to(dtype)


def run(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Sequence[Meta | None],
    reason: str = "it has no lowering rule",
) -> tuple[Any, ...]:
    """Places a call of an operator's CPU kernel into the program, and tells of it and why it is not lowered.

    Returns one array per result, None where undefined. Raises NeedsHost where the device's programs cannot
    call the host.
    """
    can_call = callback_policy()
    if can_call is not None and not can_call():
        raise NeedsHost(op._schema.name, reason)
    _fallbacks.inside_graph(op._schema.name, reason)
    arrays: list[jax.Array] = []

    class Slot(int):
        kind: type | None = None

        def __repr__(self) -> str:
            return f"<{int(self)} {self.kind}>"

    def freeze(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(freeze(e) for e in x)
        if isinstance(x, (jax.Array, NumberInput)):
            slot = Slot(len(arrays))
            slot.kind = x.kind if isinstance(x, NumberInput) else None
            arrays.append(x.value if isinstance(x, NumberInput) else x)
            return slot
        return x

    args, kwargs = promoted_arrays(op, args, kwargs, out)
    template = freeze(list(args)), {k: freeze(v) for k, v in kwargs.items()}
    types = [np.dtype(array.dtype) for array in arrays]
    settings = call_settings.current()
    metas = [m for m in out if m is not None]
    shapes = [_carried(m.shape, dtypes.numpy_dtype(m.dtype)) for m in metas]

    def host(*values: np.ndarray) -> tuple[np.ndarray, ...]:
        global _interrupt
        try:
            return compute(values)
        except BaseException as error:
            if not isinstance(error, Exception):  # XLA would make a text of it
                _interrupt = error
            raise

    def compute(values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        def thaw(x: Any) -> Any:
            if isinstance(x, Slot):
                value = _unpack_on_host(np.asarray(values[x]), types[x])
                tensor = from_numpy(value, dtypes.torch_dtype(value.dtype))
                return tensor if x.kind is None else x.kind(tensor.item())
            if isinstance(x, (list, tuple)):
                return type(x)(thaw(e) for e in x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        positional, keywords = thaw(template[0]), {k: thaw(v) for k, v in template[1].items()}
        with torch.no_grad(), call_settings.as_recorded(settings):
            returned = op(*with_tensors(op, positional), **keywords)
        results = results_of(op, returned, positional, keywords)
        # PyTorch's kernel may compute more results than its mask asks for, which the metas leave out.
        results_metas = [(r, m) for r, m in zip(results, out, strict=True) if m is not None]
        return tuple(_pack_on_host(to_numpy(_checked(op, r, m).to(m.dtype).expand(m.shape))) for r, m in results_metas)

    if has_own_text(template):
        # Equal calls of the host are known as such, each a function of its own: see `functions/programs.py`.
        host.identity = f"{op} {template} {types} {out}"  # type: ignore[attr-defined]
    packed = jax.pure_callback(host, tuple(shapes), *map(_pack, arrays), vmap_method="sequential")
    values = iter([_unpack(x, m) for x, m in zip(packed, metas, strict=True)])
    return tuple(None if m is None else next(values) for m in out)


def _checked(op: OpOverload, result: torch.Tensor | None, meta: Meta) -> torch.Tensor:
    if result is None:
        raise RuntimeError(
            f"[callback {op}] got no value of PyTorch's CPU kernel, expected {meta.dtype}{list(meta.shape)} as of its "
            "Meta kernel; give the operator a rule in ops/"
        )
    return result


def with_tensors(op: OpOverload, positional: Sequence[Any]) -> list[Any]:
    """The arguments with numbers made tensors where the operator has tensors, which overloads themselves do not do."""
    declared = [a for a in op._schema.arguments if not a.kwarg_only]
    # A number has the precision of what it meets; as a tensor of the default dtype it would be rounded to that first.
    double = any(isinstance(x, torch.Tensor) and x.dtype in (torch.float64, torch.complex128) for x in positional)
    types = dtypes.number_dtypes(torch.float64 if double else call_settings.default_dtype())
    return [
        torch.tensor(x, dtype=types[type(x)])
        if isinstance(x, (bool, int, float, complex)) and isinstance(a.type, torch.TensorType)
        else x
        for x, a in zip(positional, declared, strict=True)
    ]


def results_of(
    op: OpOverload, returned: Any, positional: Sequence[Any], keywords: dict[str, Any]
) -> list[torch.Tensor | None]:
    """The tensors a call made, then those it wrote: the order in which the recorder counts a node's results.

    One that was not made, such as a gradient that nobody asked for, has its place too; one that was not given to be
    written has none.
    """
    schema = op._schema
    values = returned if len(schema.returns) > 1 else (returned,)
    fresh = [
        value
        for value, result in zip(values, schema.returns, strict=False)
        if result.alias_info is None or not result.alias_info.is_write
    ]
    remaining = iter(positional)
    arguments = [(a, keywords[a.name] if a.name in keywords else next(remaining)) for a in schema.arguments]
    written = [value for a, value in arguments if a.alias_info is not None and a.alias_info.is_write]
    outputs = [x if isinstance(x, torch.Tensor) else None for x in pytree.tree_leaves(fresh)]
    return outputs + [x for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)]


# JAX cuts 64-bit values of a callback to 32 bits where the process has them off, and it decides when the program runs.
# They travel as pairs of 32-bit words.


def _words(dtype: np.dtype) -> int:
    """Number of words per element; 0 for a dtype that travels as it is."""
    return dtype.itemsize // 4 if dtype in (np.float64, np.int64, np.uint64, np.complex128) else 0


def _carried(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
    words = _words(dtype)
    return jax.ShapeDtypeStruct((*shape, words), np.uint32) if words else jax.ShapeDtypeStruct(shape, dtype)


def _pack(x: jax.Array) -> jax.Array:
    if not _words(np.dtype(x.dtype)):
        return x
    if x.dtype == np.complex128:
        parts = jax.numpy.stack([x.real, x.imag], -1)
        return jax.lax.bitcast_convert_type(parts, np.uint32).reshape(*x.shape, 4)
    return jax.lax.bitcast_convert_type(x, np.uint32)


def _unpack(x: jax.Array, meta: Meta) -> jax.Array:
    dtype = dtypes.numpy_dtype(meta.dtype)
    if not _words(dtype):
        return x
    if dtype != np.complex128:
        return jax.lax.bitcast_convert_type(x, dtype)
    parts = jax.lax.bitcast_convert_type(x.reshape(*meta.shape, 2, 2), np.float64)
    return jax.lax.complex(parts[..., 0], parts[..., 1])


def _pack_on_host(x: np.ndarray) -> np.ndarray:
    words = _words(x.dtype)
    return np.ascontiguousarray(x).reshape(*x.shape, 1).view(np.uint32) if words else x


def _unpack_on_host(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(x).view(dtype).reshape(x.shape[:-1]) if _words(dtype) else x
