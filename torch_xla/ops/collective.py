"""Collectives: what the processes of a job compute together.

All are one recorded operator, `xla::collective`, whose text says what is done. On this machine's CPU a program calls
PyTorch's process groups; elsewhere it has StableHLO's operations, with one replica per process.

Both engines know a collective by its group and its place in the order, so each is told what the one before it gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from torch_xla import _bindings
from torch_xla._jax_internals import Primitive, ir
from torch_xla._jax_internals import stablehlo as hlo
from torch_xla.ops import host_kernel
from torch_xla.ops.collective_call import REDUCTIONS, Call, Groups, by_dtype, parse

_TARGET = "torch_xla.collective"
_AHEAD = 15  # collectives that a process announces at once; as in csrc/run/collective_kernel.cpp


@functools.cache
def register() -> bool:
    """Makes PyTorch's groups known to XLA:CPU; False if this package was built where jaxlib's headers were missing."""
    target = _bindings.collective_kernel_target()
    if target is None:
        return False
    jax.ffi.register_ffi_target(_TARGET, target, platform="cpu")
    return True


@dataclass
class Order:
    """The collectives of a program so far."""

    # per group of this process, what stands for each that is to come
    to_come: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    by_host: bool = True  # whether PyTorch's groups may compute them
    before: jax.Array | None = None  # what the one before gave

    def take_ahead(self, group: tuple[int, ...]) -> list[int]:
        """The numbers of a group's next collective, which comes now, and of some after it."""
        ahead = self.to_come.get(group, [])
        self.to_come[group] = ahead[1:]
        return ahead[:_AHEAD]


def compute(text: str, arrays: Sequence[jax.Array], rank: int, order: Order) -> tuple[jax.Array, ...]:
    """Places a collective into the program, behind those of `order`, which it enters.

    Returns one array per input, and a number that is there once it has run.
    """
    call = parse(text)
    if not (order.by_host and host_kernel.in_use() and register()):
        if order.before is not None:
            *arrays, _ = lax.optimization_barrier((*arrays, order.before))
        results = _LOWERED[call.kind](call, arrays, rank)
        order.before = lax.optimization_barrier((jnp.zeros((), np.uint8), *results))[0]
        return (*results, order.before)
    outputs: dict[int, jax.Array] = {}
    before = jnp.zeros((), np.uint8) if order.before is None else order.before
    for places in by_dtype([array.dtype for array in arrays]):
        values = [arrays[i] for i in places]
        # The values of one dtype after the other are one collective.
        attributes = call.attributes([] if outputs else order.take_ahead(call.group_of(rank)))
        outs = [jax.ShapeDtypeStruct(call.shape_of_result(v.shape, rank), v.dtype) for v in values]
        kernel = jax.ffi.ffi_call(_TARGET, [*outs, jax.ShapeDtypeStruct((), np.uint8)], has_side_effect=True)
        *results, before = kernel(*values, before, **{name: _attribute(value) for name, value in attributes.items()})
        outputs.update(zip(places, results, strict=True))
    order.before = before
    return (*(outputs[i] for i in range(len(arrays))), before)


def _attribute(value: str | int | list[int]) -> Any:
    return value if isinstance(value, str) else np.int64(value) if isinstance(value, int) else np.array(value, np.int64)


# StableHLO.


def _dense(rows: Sequence[Sequence[int]]) -> Any:
    width = max(map(len, rows))
    table: Any = np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.int64)
    return ir.DenseIntElementsAttr.get(table)


def _type(aval: Any) -> Any:
    return ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))


def _reduce_with(operation: Any, reduction: str, dtype: Any) -> None:
    scalar = ir.RankedTensorType.get([], mlir.dtype_to_ir_type(dtype))
    block = operation.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        hlo.return_([getattr(hlo, REDUCTIONS[reduction][1])(*block.arguments)])


def _lower_all_reduce(context: Any, *xs: Any, groups: Groups, reduction: str) -> Any:
    operation = hlo.AllReduceOp([x.type for x in xs], list(xs), _dense(groups))
    _reduce_with(operation, reduction, context.avals_in[0].dtype)
    return operation.results


def _lower_reduce_scatter(context: Any, x: Any, groups: Groups, reduction: str) -> Any:
    operation = hlo.ReduceScatterOp(_type(context.avals_out[0]), x, 0, _dense(groups))
    _reduce_with(operation, reduction, context.avals_in[0].dtype)
    return operation.results


def _lower_all_gather(context: Any, x: Any, groups: Groups) -> Any:
    return hlo.AllGatherOp([_type(context.avals_out[0])], [x], 0, _dense(groups)).results


def _lower_all_to_all(context: Any, x: Any, groups: Groups) -> Any:
    return hlo.AllToAllOp([x], 0, 0, len(groups[0]), _dense(groups)).results


def _lower_permute(context: Any, x: Any, pairs: tuple[tuple[int, int], ...]) -> Any:
    return [hlo.CollectivePermuteOp(x, _dense(pairs)).result]


def primitive(
    name: str, abstract: Callable[..., Any], lowering: Callable[..., Any], several: bool = False
) -> Primitive:
    """A primitive of JAX's, ``torch_xla_<name>``.

    `abstract` gives shapes and dtypes of results from those of arguments.
    """
    new_primitive = Primitive(f"torch_xla_{name}")
    new_primitive.multiple_results = several
    new_primitive.def_abstract_eval(abstract)
    mlir.register_lowering(new_primitive, lowering)
    return new_primitive


def _leading(size: Callable[[int, int], int]) -> Callable[..., Any]:
    def abstract(x: Any, *, groups: Groups, **_: Any) -> Any:
        return jax.core.ShapedArray((size(x.shape[0], len(groups[0])), *x.shape[1:]), x.dtype)

    return abstract


_all_reduce_p = primitive(
    "all_reduce", lambda *xs, **_: [jax.core.ShapedArray(x.shape, x.dtype) for x in xs], _lower_all_reduce, several=True
)
_reduce_scatter_p = primitive("reduce_scatter", _leading(lambda n, k: n // k), _lower_reduce_scatter)
_all_gather_p = primitive("all_gather", _leading(lambda n, k: n * k), _lower_all_gather)
_all_to_all_p = primitive("all_to_all", _leading(lambda n, k: n), _lower_all_to_all)
_permute_p = primitive("permute", lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype), _lower_permute)


def _replica() -> jax.Array:
    """The rank of the process that runs the program, as the program itself learns it."""
    return _replica_p.bind()


def _lower_replica(context: Any) -> Any:
    return [hlo.convert(_type(context.avals_out[0]), hlo.ReplicaIdOp().result)]


_replica_p = primitive("replica", lambda: jax.core.ShapedArray((), np.int32), _lower_replica)


def _even(groups: Groups) -> bool:
    return len({len(group) for group in groups}) == 1


def _of_rank(call: Call, number: Callable[[tuple[int, ...]], int | range]) -> jax.Array:
    """A number of this process's group, or one for each of its members of which this process's counts."""
    numbers = np.zeros(sum(map(len, call.groups)), np.int32)
    for group in call.groups:
        numbers[list(group)] = number(group)
    return jnp.asarray(numbers)[_replica()]


def _place(call: Call) -> jax.Array:
    """This process's place in its group."""
    return _of_rank(call, lambda group: range(len(group)))


# Where they begin, and what they do.
_BITWISE: dict[str, Callable[[Any], tuple[Any, Callable[..., Any]]]] = {
    "and": lambda kind: (np.array(-1).astype(kind), lax.bitwise_and),
    "or": lambda kind: (np.array(0, kind), lax.bitwise_or),
    "xor": lambda kind: (np.array(0, kind), lax.bitwise_xor),
}


def _reduce(call: Call, arrays: Sequence[jax.Array], reduction: str) -> list[jax.Array]:
    """One operation of all arrays of a type, and those of the types one after the other."""
    outputs: dict[int, jax.Array] = {}
    before: jax.Array | None = None
    for kind in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == kind]
        values = [arrays[i] for i in places]
        if before is not None:
            *values, _ = lax.optimization_barrier((*values, before))
        reducer = {"sum": "or", "mul": "and"}.get(reduction, reduction) if kind == np.bool_ else reduction
        if reducer in _BITWISE and kind != np.bool_:  # XLA:CPU has none of these
            results = [_reduce_gathered(call, x, reducer) for x in values]
        else:
            results = _all_reduce_p.bind(*values, groups=call.groups, reduction=reducer)
        before = results[0]
        outputs.update(zip(places, results, strict=True))
    return [outputs[i] for i in range(len(arrays))]


def _reduce_gathered(call: Call, x: jax.Array, reduction: str) -> jax.Array:
    start, operation = _BITWISE[reduction](x.dtype)
    gathered = _gathered(call, x)
    there = jnp.arange(gathered.shape[0]) < _of_rank(call, len)
    gathered = jnp.where(there.reshape(-1, *[1] * x.ndim), gathered, start)
    return lax.reduce(gathered, start, operation, (0,))


def _all_reduce(call: Call, arrays: Sequence[jax.Array], rank: int) -> list[jax.Array]:
    return _reduce(call, arrays, call.reduction)


def _selected(call: Call, x: jax.Array, keep: jax.Array) -> jax.Array:
    """A sum over the group in which one process alone has another value than zero, bit by bit."""
    kind = x.dtype
    if kind == np.bool_:
        return _reduce(call, [jnp.where(keep, x, False)], "or")[0]
    if jnp.issubdtype(kind, np.complexfloating):
        parts = [jnp.where(keep, part, 0) for part in (x.real, x.imag)]
        return lax.complex(*_reduce(call, parts, "sum"))
    return _reduce(call, [jnp.where(keep, x, jnp.zeros_like(x))], "sum")[0]


def _broadcast(call: Call, arrays: Sequence[jax.Array], rank: int) -> list[jax.Array]:
    keep = _place(call) == call.root
    return [_selected(call, x, keep) for x in arrays]


def _gathered(call: Call, x: jax.Array) -> jax.Array:
    """The arrays of a group one after the other, where groups have several sizes as many as the largest has."""
    if _even(call.groups):
        return _all_gather_p.bind(x[None], groups=call.groups)
    # Groups of several sizes would give several shapes in one module.
    wide = max(map(len, call.groups))
    spread = jnp.zeros((wide, *x.shape), x.dtype).at[_place(call)].set(x)
    return _selected(call, spread, jnp.asarray(True))


def _widened(call: Call, x: jax.Array) -> jax.Array:
    """An array with a part for each of a group, with as many parts as the largest group needs."""
    wide = max(map(len, call.groups))
    return jnp.zeros((wide, *x.shape[1:]), x.dtype).at[: x.shape[0]].set(x)


def _all_gather(call: Call, arrays: Sequence[jax.Array], rank: int) -> list[jax.Array]:
    (x,) = arrays
    return [_gathered(call, x)[: len(call.group_of(rank))]]


def _reduce_scatter(call: Call, arrays: Sequence[jax.Array], rank: int) -> list[jax.Array]:
    (x,) = arrays
    reduction = call.reduction
    if x.dtype == np.bool_:
        reduction = {"sum": "or", "mul": "and"}.get(reduction, reduction)
    if _even(call.groups) and (reduction not in _BITWISE or x.dtype == np.bool_):
        return [_reduce_scatter_p.bind(x, groups=call.groups, reduction=reduction)[0]]
    return [_reduce(call, [_widened(call, x)], reduction)[0][_place(call)]]


def _all_to_all(call: Call, arrays: Sequence[jax.Array], rank: int) -> list[jax.Array]:
    (x,) = arrays
    if _even(call.groups):
        return [_all_to_all_p.bind(x, groups=call.groups)]
    return [_gathered(call, _widened(call, x))[: x.shape[0], _place(call)]]


def _permute(call: Call, arrays: Sequence[jax.Array], rank: int) -> list[jax.Array]:
    if not call.pairs:
        return [jnp.zeros_like(x) for x in arrays]
    return [_permute_p.bind(x, pairs=call.pairs) for x in arrays]


_LOWERED: dict[str, Callable[[Call, Sequence[jax.Array], int], list[jax.Array]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "permute": _permute,
    "reduce_scatter": _reduce_scatter,
}
