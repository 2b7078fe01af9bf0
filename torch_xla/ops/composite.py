"""Rules of the marks around a composite, and StableHLO's `composite`: a named operation that has its own meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from torch_xla._jax_internals import ir
from torch_xla.ops.registry import Context, lowers


@lowers("xla.mark_tensor.default", "xla.mark_boundary.default")
def _mark(ctx: Context, x: jax.Array, *boundary: Any) -> jax.Array:
    # Not part of a whole composite: the mark says nothing.
    return x


def composite(
    function: Callable[..., Sequence[Any]], name: str, attributes: Mapping[str, Any], operands: Sequence[Any]
) -> Sequence[Any]:
    """Calls a function as a composite: what it computes of the operands, nests of arrays, is the meaning of the name.

    Attributes are strings, numbers, truth values, or lists of them.
    """
    return jax.lax.composite(lambda *operands, **_: tuple(function(*operands)), name)(
        *operands, **{key: _attribute(value) for key, value in attributes.items()}
    )


def _attribute(value: Any) -> Any:
    if isinstance(value, float):
        return np.float32(value)
    if not isinstance(value, (list, tuple)):
        return value
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def name_meanings(module: Any) -> None:
    """Names the functions that composites refer to ``<name>.impl``, ``<name>.impl_0`` and so on, as torch_xla 2."""
    functions = {f.name.value: f for f in module.body.operations if f.operation.name == "func.func"}
    calls = [
        op
        for function in functions.values()
        for op in function.regions[0].blocks[0].operations
        if op.operation.name == "stablehlo.composite"
    ]
    names: dict[str, str] = {}  # some may share a function
    count: dict[str, int] = {}
    with module.context:
        for call in calls:
            name = ir.StringAttr(call.attributes["name"]).value
            old = ir.FlatSymbolRefAttr(call.attributes["decomposition"]).value
            if old not in names:
                number = count[name] = count.get(name, -2) + 1
                names[old] = f"{name}.impl" if number < 0 else f"{name}.impl_{number}"
                functions[old].attributes["sym_name"] = ir.StringAttr.get(names[old])
            call.attributes["decomposition"] = ir.FlatSymbolRefAttr.get(names[old])
