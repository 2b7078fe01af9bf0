"""PyTorch's own decompositions, run over JAX arrays for operators that have no rule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torch_xla._torch_internals import DispatchKey, OpOverload, TorchDispatchMode, no_dispatch_modes, pytree
from torch_xla.ops import dtypes
from torch_xla.ops.registry import Meta

_EXCLUDED = frozenset(
    {
        # Their decompositions read values or call back into themselves.
        "aten.nonzero.default",
        "aten.item.default",
        "aten._local_scalar_dense.default",
    }
)


def find(op: OpOverload) -> Callable[..., Any] | None:
    """PyTorch's decomposition of `op`, or that of the library that `op` is from, or None."""
    if str(op) in _EXCLUDED:
        return None
    from torch_xla._torch_internals import decomposition_table

    decomposition: Callable[..., Any] | None = decomposition_table.get(op)
    if decomposition is None and op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    if decomposition is None and op.namespace != "aten" and op.has_kernel_for_dispatch_key(DispatchKey.XLA):
        # Of a library: a kernel for this device that is made of other operators.
        return functools.partial(op._op_dk, DispatchKey.XLA)
    return decomposition


class _Array(torch.Tensor):
    """A meta tensor that carries the JAX array it stands for."""

    array: jax.Array

    @staticmethod
    def wrap(array: jax.Array, strides: Sequence[int] | None = None) -> _Array:
        dtype = dtypes.torch_dtype(array.dtype)
        if strides is None:
            meta = torch.empty(array.shape, dtype=dtype, device="meta")
        else:
            meta = torch.empty_strided(array.shape, strides, dtype=dtype, device="meta")
        wrapped = torch.Tensor._make_subclass(_Array, meta)
        wrapped.array = array
        return wrapped


class _LowerMode(TorchDispatchMode):
    """Sends every operator a decomposition calls to `call`, the door to the rules."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with no_dispatch_modes():
            metas = func(
                *pytree.tree_map_only(torch.Tensor, _meta_like, args),
                **{
                    k: torch.device("meta") if k == "device" else pytree.tree_map_only(torch.Tensor, _meta_like, v)
                    for k, v in kwargs.items()
                },
            )
        metas = requested_results(func, args, metas)
        flat, spec = pytree.tree_flatten(metas)
        tensors = [m for m in flat if isinstance(m, torch.Tensor)]
        if not tensors:
            return metas
        unwrap = lambda x: x.array if isinstance(x, _Array) else _constant(x)  # noqa: E731
        args, kwargs = pytree.tree_map_only(torch.Tensor, unwrap, (tuple(args), kwargs))
        positional, keywords = bind(func, args, kwargs)
        _check_functional(func)
        outs = [Meta(tuple(m.shape), m.dtype) if isinstance(m, torch.Tensor) else None for m in flat]
        arrays = self.call(func, positional, keywords, outs)
        wrapped = [_Array.wrap(a, m.stride()) if a is not None else None for a, m in zip(arrays, flat, strict=True)]
        return pytree.tree_unflatten(wrapped, spec)


def requested_results(op: OpOverload, args: Sequence[Any], results: Any) -> Any:
    """The results of a call without those that its mask does not ask for, which some Meta kernels give all the same.

    The recorder does the same in `csrc/record/meta_cache.cpp`.
    """
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if str(argument.type) == "List[bool]" and isinstance(results, tuple) and len(results) == argument.N:  # type: ignore[attr-defined]
            return tuple(result if is_requested else None for result, is_requested in zip(results, value, strict=True))
    return results


def _meta_like(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, _Array) or x.device.type == "meta":
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x if x.dim() == 0 else x.to("meta")


def _constant(x: torch.Tensor) -> Any:
    """A tensor the decomposition made itself on the host."""
    if x.dim() == 0 and x.device.type == "cpu":
        number = x.item()
        return number if _is_wrapped(x) else dtypes.cast(number, x.dtype)
    import jax.numpy as jnp

    return jnp.asarray(x.numpy())


def _is_wrapped(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float64, torch.int64, torch.bool, torch.complex128)


def _check_functional(func: OpOverload) -> None:
    if func._schema.is_mutable:
        raise RuntimeError(
            f"[lower {func}] a decomposition wrote in place, which lowering cannot follow; "
            "give the operator a rule in ops/"
        )


def bind(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Fills in the schema's defaults, and separates positional from keyword-only arguments.

    TypeError where one lacks.
    """
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    supplied = iter(args)
    for argument in op._schema.arguments:
        if argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            nothing = object()
            value = next(supplied, nothing) if not argument.kwarg_only else nothing
            if value is nothing:
                if not argument.has_default_value() and not argument.is_out:
                    raise TypeError(f"[lower {op}] missing argument {argument.name!r}")
                value = argument.default_value
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return positional, keywords


def separate(op: OpOverload, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Separates positional from keyword-only arguments, all of which are given in the schema's order."""
    names = _keywords(op)
    first = len(values) - len(names)
    return list(values[:first]), dict(zip(names, values[first:], strict=True))


@functools.cache
def _keywords(op: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments if argument.kwarg_only)


def run(
    decomposition: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], call: Callable[..., Any]
) -> tuple[Any, ...]:
    """Runs a decomposition, a function over tensors, over arrays, and gives its results as a flat tuple.

    `call` computes an operator on arrays, as `ops.call.call` does.
    """

    def enter(x: Any) -> Any:
        return _Array.wrap(x) if isinstance(x, jax.Array) else x

    args, kwargs = _map(enter, args, kwargs)
    with _LowerMode(call), torch.no_grad():
        results = decomposition(*args, **kwargs)
    flat = results if isinstance(results, (tuple, list)) else (results,)
    flat = tuple(itertools.chain.from_iterable(x if isinstance(x, (tuple, list)) else (x,) for x in flat))
    return tuple(x.array if isinstance(x, _Array) else x for x in flat)


def _map(fn: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def walk(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(walk(e) for e in x)
        return fn(x)

    return [walk(a) for a in args], {k: walk(v) for k, v in kwargs.items()}
