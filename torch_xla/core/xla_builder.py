"""XLA operations in Python: functions made of `Op` values, and functions written in JAX, over xla tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_xla import _bindings
from torch_xla._core.functions import jax_functions
from torch_xla._legacy.xla_op import Builder as Builder
from torch_xla._legacy.xla_op import Op as Op
from torch_xla._legacy.xla_shape import TORCH_TO_XLA as _PT_XLA_TYPE_MAP  # noqa: F401
from torch_xla._legacy.xla_shape import XLA_TO_TORCH as _XLA_PT_TYPE_MAP  # noqa: F401
from torch_xla._legacy.xla_shape import Shape as Shape
from torch_xla._legacy.xla_shape import Type as Type


@dataclass(frozen=True)
class Computation:
    """A function that was traced for certain shapes.

    Attributes:
        name: Its registered name.
        tuple_result: Whether it returns a tuple rather than one value.
    """

    name: str
    tuple_result: bool


def create_builder(name: str) -> Builder:
    """Makes a builder for constants of a computation."""
    return Builder(name)


def mkshape(dtype: str, sizes: Sequence[int], dynamic_dimensions: Sequence[bool] | None = None) -> Shape:
    """The shape of an array; see `Shape.create`."""
    return Shape.create(dtype, sizes, dynamic_dimensions)


def tensor_shape(tensor: Any, device: str = "") -> Any:
    """The shape of a tensor, or of each in a list.

    Args:
        tensor: A tensor, or several.
        device: Ignored: types are the same on every device.
    """
    if isinstance(tensor, (list, tuple)):
        return [tensor_shape(t) for t in tensor]
    return Shape.create(Op.from_torch_type(tensor.dtype), tuple(tensor.shape))


def create_placeholder_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the current device that has no values: what is done with it can be traced and written out.

    Args:
        shape: Its sizes.
        dtype: Its type.

    Returns:
        The tensor; it takes no memory. Reading it, or a graph that has it as an input being run, raises RuntimeError.
    """
    return _bindings.placeholder(list(shape), dtype, _bindings.current_device())


def create_computation(name: str, fn: Callable[..., Any], shapes: Sequence[Shape], **kwargs: Any) -> Computation:
    """Traces a function over ops.

    Args:
        name: What it is called in dumps and profiles.
        fn: Takes one `Op` per shape and returns one, or a tuple of them.
        shapes: Shapes of the arguments.
        **kwargs: Passed to `fn`.
    """
    from torch_xla.ops.registry import Meta

    single = True

    def function(*arrays: Any) -> tuple[Any, ...]:
        nonlocal single
        result = Op.wrap_function(lambda *ops: fn(*ops, **kwargs))(*(Op(a) for a in arrays)).op
        single = not isinstance(result, tuple)
        return (result,) if single else result

    metas = [Meta(tuple(s.sizes), Op.to_torch_type(s.dtype)) for s in shapes]
    registered = jax_functions.trace(function, metas, name)
    return Computation(registered, not single)


def get_computation_hlo(computation: Computation) -> str:
    """The computation as text."""
    return jax_functions.text(computation.name)


def xla_computation_as_func(computation: Computation, name: str | None = None) -> Callable[[Any], list[torch.Tensor]]:
    """A computation as a function of a list of tensors.

    Args:
        computation: What `create_computation` returned.
        name: Ignored: the computation has a name.
    """

    def function(input_tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return jax_functions.call(computation.name, input_tensors)

    return function


# What `call_jax` traced: the name of the program and the structure of its results. Scripts clear it.
_JAX_TO_XLA_COMPUTATION_CACHE: dict[Any, tuple[str, Any]] = {}

# Settings of JAX that a traced function depends on.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def _jax_to_xla_computation_cache_elements() -> int:
    """How many functions and signatures `call_jax` traced."""
    return len(_JAX_TO_XLA_COMPUTATION_CACHE)


def call_jax(
    jax_func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: Any = None,
) -> Any:
    """Calls a JAX function with xla tensors; it becomes one operator of the recorded graph, without gradients.

    Args:
        jax_func: A pure function that `jax.jit` could take. It is traced once per function object and signature, of
            which JAX's settings are a part, so do not define it anew at every step. JAX's 64-bit types are on for it if
            a tensor has one.
        args: Its arguments; tensors, anywhere in them, reach it as JAX arrays, dtypes as JAX dtypes. Arrays of NumPy's
            and JAX's are brought to the device at each call.
        kwargs: Keyword arguments, likewise.
        name: What it is called in dumps and profiles.
        override_hash: What stands for the function object, for a function that is made anew at every call.

    Returns:
        What it returns, with tensors for arrays.
    """
    import jax

    from torch_xla.ops import dtypes
    from torch_xla.ops.fallback import from_numpy

    leaves, structure = jax.tree.flatten((args, kwargs or {}))
    device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), torch.device("xla"))
    for i, x in enumerate(leaves):
        if isinstance(x, (np.ndarray, jax.Array)):
            values = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))  # as JAX would take it
            leaves[i] = from_numpy(values, dtypes.torch_dtype(values.dtype)).to(device)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    metas = jax_functions.metas_of(tensors)
    fixed = tuple(None if isinstance(x, torch.Tensor) else jax_functions.constant(x) for x in leaves)
    settings = tuple(getattr(jax.config, name) for name in _JAX_SETTINGS)
    key = (jax_func if override_hash is None else override_hash, metas, fixed, structure, settings)
    entry = _JAX_TO_XLA_COMPUTATION_CACHE.get(key)
    if entry is None:
        out_structure = None

        def function(*arrays: Any) -> list[Any]:
            nonlocal out_structure
            operands = iter(arrays)
            values = [
                next(operands)
                if isinstance(x, torch.Tensor)
                else dtypes.numpy_dtype(x)
                if isinstance(x, torch.dtype)
                else x
                for x in leaves
            ]
            inner_args, inner_kwargs = jax.tree.unflatten(structure, values)
            results, out_structure = jax.tree.flatten(jax_func(*inner_args, **inner_kwargs))
            return [jax.numpy.asarray(r) for r in results]

        # A function that was given nothing of 64 bits sees JAX as its author does.
        wide = any(t.dtype.itemsize == 8 or t.dtype == torch.complex128 for t in tensors)
        label = name or getattr(jax_func, "__name__", "jax_function")
        registered = jax_functions.trace(function, metas, str(label), wide)
        entry = _JAX_TO_XLA_COMPUTATION_CACHE[key] = (registered, out_structure)
    registered, out_structure = entry
    return jax.tree.unflatten(out_structure, jax_functions.call(registered, tensors))
