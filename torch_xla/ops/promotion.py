"""Arguments for PyTorch's own kernels and decompositions, which promote whole numbers to the process's default dtype.

It may be another by now than the one that a call was recorded under: what would be promoted is it already.
`promote_as_recorded` in `csrc/run/host_operators.cpp` does the same where there is no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch

from torch_xla._torch_internals import OpOverload
from torch_xla.ops import dtypes
from torch_xla.ops.call_settings import default_dtype
from torch_xla.ops.registry import Meta, NumberInput


def promoted(
    op: OpOverload,
    values: Sequence[Any],
    out: Sequence[Meta | None],
    dtype_of: Callable[[Any], torch.dtype | None],
    cast: Callable[[Any, torch.dtype], Any],
) -> list[Any]:
    """The arguments of a call, in the schema's order, so that its results do not depend on PyTorch's default dtype.

    `out` has the Meta kernel's type of each result. `dtype_of` gives the dtype of a tensor among them, None of anything
    else; `cast` makes a tensor of a dtype from a tensor or a number.
    """
    default = default_dtype()
    arguments = list(values)
    schema = op._schema.arguments
    for i, argument in enumerate(schema[:-1]):
        if argument.name == "dtype" and schema[i + 1].name == "layout" and arguments[i] is None and out[0] is not None:
            arguments[i] = out[0].dtype
    gives = {meta.dtype.to_real() for meta in out if meta is not None}
    decided = any(a.name == "dtype" and v is not None for a, v in zip(schema, arguments, strict=True))
    tensors = [dtype for value in _flat(arguments) if (dtype := dtype_of(value)) is not None]
    if decided or not gives & {default, torch.bool} or any(d.is_floating_point or d.is_complex for d in tensors):
        return arguments
    numbers = {i: _kind(v) for i, v in enumerate(arguments) if _kind(v) in (float, complex)}
    as_tensors = [i for i in numbers if isinstance(schema[i].real_type, torch.TensorType)]
    if as_tensors:  # such a number decides for what it meets, such as what a mask selects from
        types = dtypes.number_dtypes(default)
        for i in as_tensors:
            arguments[i] = cast(arguments[i], types[numbers[i]])
        return arguments
    if default not in gives and not any("number" in str(schema[i].real_type) for i in numbers):
        return arguments

    def as_default(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(as_default, x))
        return x if dtype_of(x) is None else cast(x, default)

    return list(map(as_default, arguments))


def promoted_arrays(
    op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Meta | None]
) -> tuple[list[Any], dict[str, Any]]:
    """Promotes JAX arrays as above, with keyword-only arguments separate."""
    arguments = promoted(
        op,
        [*args, *kwargs.values()],
        out,
        lambda x: dtypes.torch_dtype(x.dtype) if isinstance(x, jax.Array) else None,
        dtypes.cast,
    )
    return arguments[: len(args)], dict(zip(kwargs, arguments[len(args) :], strict=True))


def _kind(x: Any) -> type:
    return x.kind if isinstance(x, NumberInput) else type(x)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
