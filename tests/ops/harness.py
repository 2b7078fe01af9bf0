"""Lowers one operator on CPU tensors without a device, and compares it with PyTorch's CPU kernel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_xla.ops import call as call_module
from torch_xla.ops import fallback
from torch_xla.ops.decompositions import asked, bind
from torch_xla.ops.registry import Lifted, Meta, StaticNumbers

SCALARS = ("number", "Optional[number]", "List[number]")
NUMBERS = {
    form.format(kind) for kind in ("int", "float") for form in ("{}", "Optional[{}]", "List[{}]", "Optional[List[{}]]")
} | {*SCALARS}


def scalars(op: torch._ops.OpOverload) -> frozenset[int]:
    """Positions of the arguments whose numbers are inputs of a program from the start."""
    return frozenset(i for i, a in enumerate(op._schema.arguments) if str(a.type) in SCALARS)


def numbers(op: torch._ops.OpOverload) -> frozenset[int]:
    """Positions of the arguments whose numbers may be inputs of a program, if they vary."""
    return frozenset(i for i, a in enumerate(op._schema.arguments) if str(a.real_type) in NUMBERS)


def lower(
    op: torch._ops.OpOverload, *args: Any, lift: frozenset[int] | None = None, **kwargs: Any
) -> list[torch.Tensor | None]:
    """Runs `op` through its lowering; tensors in, tensors out.

    Args:
        op: Operator overload, for example ``torch.ops.aten.add.Tensor``.
        *args: Arguments as PyTorch takes them, CPU tensors.
        lift: Arguments whose numbers are inputs of the program; by default those of type Scalar, the way the recorder
            has it. Those that no program can be made with are constants.
        **kwargs: Keyword arguments.
    """
    return _lower(op, [scalars(op) if lift is None else lift], args, kwargs)[0]


def _lower(
    op: torch._ops.OpOverload, lifts: list[frozenset[int]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[list[torch.Tensor | None]]:
    """As `lower`, with one choice of inputs and with another, compiled as one program."""
    meta = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
    try:
        results = op(
            *meta[0], **{k: (torch.device("meta") if isinstance(v, torch.device) else v) for k, v in meta[1].items()}
        )
    except NotImplementedError:
        # Without a meta kernel only the CPU kernel tells shapes and dtypes.
        results = op(*args, **kwargs)
    results = asked(op, args, results)
    flat = list(results) if isinstance(results, (tuple, list)) else [results]
    flat = [y for x in flat for y in (x if isinstance(x, (tuple, list)) else [x])]
    outs = [Meta(tuple(m.shape), m.dtype) if isinstance(m, torch.Tensor) else None for m in flat]
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        seed = (jnp.asarray(7, jnp.int64), jnp.asarray(3, jnp.int64)) if seeded else None
        with mock.patch.object(call_module, "passed_over", _refuse):
            # Those that end up with the same inputs are one program.
            traced = {lift: part for lift, *part in (_traced(op, lift, args, kwargs, outs, seed) for lift in lifts)}
            programs = [program for program, _ in traced.values()]
            whole = jax.jit(lambda inputs: [program(own, seed) for program, own in zip(programs, inputs, strict=True)])
            found = whole([arrays for _, arrays in traced.values()])
        return [
            [
                None if m is None else fallback.from_numpy(np.asarray(v), m.dtype)
                for v, m in zip(values, outs, strict=True)
            ]
            for values in found
        ]


def _traced(
    op: torch._ops.OpOverload,
    lift: frozenset[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outs: list[Meta | None],
    seed: Any,
) -> tuple[frozenset[int], Any, list[Any]]:
    """The arguments whose numbers turn out to be inputs, the program, which JAX has traced, and its inputs."""
    positional, keywords = bind(op, args, kwargs)
    varied = not lift <= scalars(op)
    places = {a.name: i for i, a in enumerate(op._schema.arguments)}
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    arrays: list[Any] = []

    def slot(x: Any, place: int) -> Any:
        if isinstance(x, torch.Tensor):
            arrays.append(jnp.asarray(fallback.to_numpy(x)))
            return ("array", len(arrays) - 1)
        # Scalars 0 and 1 that are Python ints stay constants; so do bools.
        special = isinstance(x, bool) or (not varied and isinstance(x, int) and x in (0, 1))
        if place in lift and isinstance(x, (int, float, complex)) and not special:
            arrays.append(jnp.asarray(x, dtype={int: np.int64, float: np.float64, complex: np.complex128}[type(x)]))
            return ("lifted", len(arrays) - 1, type(x), place)
        if isinstance(x, (list, tuple)):
            return [slot(e, place) for e in x]
        return ("plain", x)

    template = (
        [slot(a, places[n]) for a, n in zip(positional, names, strict=True)],
        {k: slot(v, places[k]) for k, v in keywords.items()},
    )

    def program(values: list[Any], seed: Any) -> Any:
        def fill(x: Any) -> Any:
            if isinstance(x, list):
                return [fill(e) for e in x]
            if x[0] == "array":
                return values[x[1]]
            return Lifted(values[x[1]], x[2], str(op), x[3], varied) if x[0] == "lifted" else x[1]

        return call_module.call(
            op, [fill(a) for a in template[0]], {k: fill(v) for k, v in template[1].items()}, outs, seed
        )

    jitted = jax.jit(program)
    try:
        jitted.trace(arrays, seed)
    except StaticNumbers as static:
        rest = lift.difference(lift if static.arguments is None else static.arguments)
        assert rest != lift, f"{op} asks for {static.arguments}, which it has"
        return _traced(op, rest, args, kwargs, outs, seed)
    return lift, jitted, arrays


def _refuse(op: torch._ops.OpOverload, error: Exception) -> None:
    raise AssertionError(f"the lowering of {op} did not take these arguments") from error


def check(
    op: torch._ops.OpOverload, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> None:
    """Asserts that the lowering of `op` gives the CPU kernel's values, shapes and dtypes, by a rule."""
    assert call_module.way_of(str(op)) == "rule", f"{op} is lowered by {call_module.way_of(str(op))}"
    with mock.patch.object(fallback, "run", side_effect=AssertionError("the rule did not take these arguments")):
        compare(op, *args, rtol=rtol, atol=atol, **kwargs)


def compare(
    op: torch._ops.OpOverload, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> None:
    """As `check`, however the operator is lowered."""
    expected = op(*args, **kwargs)
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    expected = [y for x in expected for y in (x if isinstance(x, (tuple, list)) else [x])]
    for got in _lower(op, list({scalars(op), numbers(op)}), args, kwargs):
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            if ours is None:
                continue
            torch.testing.assert_close(ours, theirs.detach(), rtol=rtol, atol=atol, check_stride=False, equal_nan=True)
