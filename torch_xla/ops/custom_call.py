"""Rule of `xla::custom_call`, StableHLO's `custom_call`: the backend, or who takes the module, knows the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from torch_xla._jax_internals import Primitive, ir, lapack, stablehlo
from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, Meta, lowers

_TYPED_FFI = 4  # the version of the calling convention whose configuration is a dictionary of MLIR

# `jax.ffi.ffi_call` cannot carry attributes for the frontend, nor a configuration that is text of MLIR.
_custom_call = Primitive("custom_call")
_custom_call.multiple_results = True


@_custom_call.def_abstract_eval
def _results(*operands: Any, outs: tuple[Meta, ...], **_: Any) -> tuple[Any, ...]:
    return tuple(jax.core.ShapedArray(m.shape, dtypes.numpy_dtype(m.dtype)) for m in outs)


def _lower(
    ctx: Any,
    *operands: Any,
    outs: tuple[Meta, ...],
    target: str,
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    attributes: tuple[tuple[str, str], ...],
) -> list[Any]:
    types = [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in ctx.avals_out]
    typed = api_version == _TYPED_FFI and backend_config
    fields = {
        "call_target_name": ir.StringAttr.get(target),
        "has_side_effect": ir.BoolAttr.get(has_side_effect),
        "backend_config": ir.Attribute.parse(backend_config) if typed else ir.StringAttr.get(backend_config),
        "api_version": mlir.i32_attr(api_version),
    }
    if attributes:
        fields["mhlo.frontend_attributes"] = ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in attributes})
    # Several results are a tuple, as in HLO.
    results = types if len(types) == 1 else [ir.TupleType.get_tuple(types)]
    call = stablehlo.CustomCallOp.build_generic(results=results, operands=operands, attributes=fields)
    if len(types) == 1:
        return [call.results[0]]
    return [stablehlo.get_tuple_element(call.results[0], i) for i in range(len(types))]


mlir.register_lowering(_custom_call, _lower)


def custom_call(
    operands: Sequence[Any],
    target: str,
    outs: Sequence[Meta | None],
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    attributes: Sequence[str] = (),
) -> list[jax.Array]:
    """Calls a target, whose results have the shapes and dtypes of `outs`.

    One with `has_side_effect` stays although its results are not used, and is not merged with an equal one. The config
    is any text, or with the newest of XLA's calling conventions, 0 to 4, a dictionary of MLIR; `attributes` are names
    and values, one after the other.
    """
    if target.startswith("lapack_"):  # known to XLA from the start, but they kill the process before they are loaded
        lapack.prepare_lapack_call("potrf", jax.numpy.float32)
    results: list[jax.Array] = _custom_call.bind(
        *operands,
        outs=tuple(outs),
        target=target,
        has_side_effect=has_side_effect,
        backend_config=backend_config,
        api_version=api_version,
        attributes=tuple(zip(attributes[::2], attributes[1::2], strict=True)),
    )
    return results


@lowers("xla.custom_call.default")
def _rule(
    ctx: Context,
    inputs: list[jax.Array],
    call_target: str,
    results: list[str],
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    frontend_attributes: list[str],
) -> tuple[jax.Array, ...]:
    return tuple(
        custom_call(inputs, call_target, ctx.out, has_side_effect, backend_config, api_version, frontend_attributes)
    )
