"""One operator under JAX tracing: its rule, else PyTorch's decomposition, else a host callback.

`call` is the only door from an operator's name to JAX code; the lowering stage calls it once per node signature.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_xla._torch_internals import OpOverload, has_computed_kernel
from torch_xla.ops import dtypes
from torch_xla.ops.promotion import promoted_arrays
from torch_xla.ops.registry import Context, Meta, NumberInput, StaticNumbers, rule_for, varied_arguments

_FAMILIES = (
    "activation",
    "attention",
    "composite",
    "conv",
    "creation",
    "ctc",
    "custom_call",
    "elementwise",
    "embedding_bag",
    "fft",
    "grouped",
    "indexing",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "optimization_barrier",
    "optimizer",
    "pad",
    "polynomials",
    "pool",
    "program",
    "quantization",
    "random",
    "reduction",
    "resize",
    "rnn",
    "sampling",
    "scan_loop",
    "shape",
    "sort",
    "special",
    "unary",
)


_varied_inputs: set[tuple[str, int]] = set()  # arguments that a lowering took as inputs after they had varied


@functools.cache
def load_rules() -> None:
    """Imports the rules, once."""
    for family in _FAMILIES:
        importlib.import_module(f"torch_xla.ops.{family}")


def find_overload(name: str) -> OpOverload:
    """The PyTorch overload called ``namespace.op.overload``."""
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def way_of(name: str) -> str:
    """How an operator is lowered: ``"rule"``, ``"decomposition"`` or ``"callback"``."""
    from torch_xla.ops import decompositions

    load_rules()
    if rule_for(name) is not None:
        return "rule"
    if decompositions.find(find_overload(name)) is not None:
        return "decomposition"
    return "callback"


def call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Sequence[Meta | None],
    seed: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array | None, ...]:
    """Computes an operator on JAX arrays; returns one per result, with the Meta kernel's shape and dtype.

    Arrays stand for tensors, numbers or `NumberInput` for numbers; `seed` is `seed_words` of an operator that draws.
    Raises StaticNumbers where numbers must be recorded as constants, and RuntimeError where a rule fails, or gives
    another shape than the Meta kernel's, and there is no CPU kernel to call instead.
    """
    from torch_xla.ops import fallback, host_kernel

    load_rules()
    name = str(op)
    results: Any = host_kernel.attempt(op, args, kwargs, out)
    if results is not None:
        return _conform_all(name, results, out)
    varied = varied_arguments(args, kwargs)
    try:
        results = _conform_all(name, _anywhere(op, args, kwargs, Context(name, tuple(out), seed)), out)
        _varied_inputs.update((name, argument) for argument in varied)
        return results
    except (StaticNumbers, fallback.NeedsHost):
        raise
    except Exception as error:
        if varied:  # perhaps because of them
            new = tuple(argument for argument in varied if (name, argument) not in _varied_inputs)
            raise StaticNumbers(name, new or varied) from error
        empty = all(meta is None or 0 in meta.shape for meta in out)
        if not empty and (seed is not None or not _has_cpu_kernel(op)):
            raise
        passed_over(op, error)
        if empty:
            return tuple(None if m is None else jnp.zeros(m.shape, dtypes.numpy_dtype(m.dtype)) for m in out)
        # A kernel takes arguments that no rule was written for, such as shapes that only it reconciles.
        reason = f"its lowering raised {type(error).__name__}: {error}"
        return _conform_all(name, fallback.run(op, args, kwargs, out, reason), out)


def passed_over(op: OpOverload, error: Exception) -> None:
    """A lowering raised, and the results come from elsewhere; tests replace this, so that none of it is hidden."""


def _has_cpu_kernel(op: OpOverload) -> bool:
    return op.namespace == "aten" and has_computed_kernel(op.name(), "CPU")


def _conform_all(name: str, results: Any, out: Sequence[Meta | None]) -> tuple[jax.Array | None, ...]:
    if not isinstance(results, (tuple, list)):
        results = (results,)
    if len(results) != len(out):
        raise RuntimeError(
            f"[lower {name}] got {len(results)} results of its rule, expected {len(out)} as of its Meta kernel"
        )
    return tuple(_conform(name, x, meta) for x, meta in zip(results, out, strict=True))


def _anywhere(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], ctx: Context) -> Any:
    """The results as any device computes them: by a rule, PyTorch's decomposition, or a callback."""
    from torch_xla.ops import decompositions, fallback

    rule = rule_for(ctx.op)
    if rule is not None:
        with jax.named_scope(op.name().split("::")[-1]):
            return rule(ctx, *args, **kwargs)
    if _has_number_input(args) or _has_number_input(kwargs.values()):
        raise StaticNumbers(ctx.op)
    decomposition = decompositions.find(op)
    if decomposition is not None:
        return decompositions.run(decomposition, *promoted_arrays(op, args, kwargs, ctx.out), call)
    return fallback.run(op, args, kwargs, ctx.out)


def _has_number_input(values: Iterable[Any]) -> bool:
    return any(isinstance(x, NumberInput) or (isinstance(x, (list, tuple)) and _has_number_input(x)) for x in values)


def _conform(name: str, x: Any, meta: Meta | None) -> jax.Array | None:
    if meta is None:
        return None
    if x is None:
        raise RuntimeError(f"[lower {name}] got no value of its rule, expected {meta.dtype}{list(meta.shape)}")
    x = dtypes.cast(x.value if isinstance(x, NumberInput) else x, meta.dtype)
    if x.shape != meta.shape:
        raise RuntimeError(f"[lower {name}] got shape {list(x.shape)} of its rule, expected {list(meta.shape)}")
    return x
