"""Lowers operators on CPU tensors without a device, and compares them with PyTorch's CPU kernels.

`values` makes a test of a table of calls, the inputs that the samples of `opdb` have not: an item for each operator,
whose calls are compiled as one program. How far values may be apart, `opdb/tolerances.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from opdb import tolerances
from opdb.compare import Outcome, difference
from opdb.schema_cases import label
from torch_xla.ops import call as call_module
from torch_xla.ops import fallback
from torch_xla.ops.decompositions import bind, requested_results
from torch_xla.ops.registry import Meta, NumberInput, StaticNumbers, seed_words

SCALARS = ("number", "Optional[number]", "List[number]")
NUMBERS = {
    form.format(kind) for kind in ("int", "float") for form in ("{}", "Optional[{}]", "List[{}]", "Optional[List[{}]]")
} | {*SCALARS}
Results = list[torch.Tensor | None]


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, as PyTorch takes them, CPU tensors."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        def shown(x: Any) -> Any:
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"

        args, kwargs = pytree.tree_map_only(torch.Tensor, shown, (self.args, self.kwargs))
        return f"{self.op}{args} {kwargs or ''}"

    def positions(self, types: Iterable[str]) -> frozenset[int]:
        """Where the arguments of some types are."""
        return frozenset(i for i, a in enumerate(self.op._schema.arguments) if str(a.real_type) in types)


Entry = tuple[Any, ...]  # an operator, its arguments, and keyword arguments as a dict if there are any


def values(table: Iterable[Entry] | Callable[[], Iterable[Entry]]) -> Callable[[str], None]:
    """A test of a table's calls: that lowerings give the CPU kernels' values, shapes and dtypes, and call none."""
    by_operator: dict[str, list[Call]] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for op, *args in table() if callable(table) else table:
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
            by_operator.setdefault(str(op), []).append(Call(op, tuple(args), kwargs))

    @pytest.mark.parametrize("name", by_operator)
    def test(name: str) -> None:
        _check(by_operator[name])

    return test


def check(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> None:
    """As `values`, of a single call."""
    _check([Call(op, args, kwargs)])


def _check(calls: Sequence[Call]) -> None:
    way = call_module.way_of(str(calls[0].op))
    assert way != "callback", f"{calls[0].op} is lowered by {way}"
    # Numbers of type Scalar are inputs of a program from the start, as the recorder has it; others, once they vary.
    lifts = [list({one.positions(SCALARS), one.positions(NUMBERS)}) for one in calls]
    with mock.patch.object(fallback, "run", side_effect=AssertionError("the lowering did not take these arguments")):
        result = _lowered(calls, lifts)
    expected = [_flat(one.op(*one.args, **one.kwargs)) for one in calls]
    wrong = []
    for one, want, ways in zip(calls, expected, result, strict=True):
        for got in ways:
            pairs = zip(want, got, strict=True)
            wrong += [f"{one}: {text}" for w, g in pairs if (text := _difference(label(str(one.op)), w, g))]
    assert not wrong, "\n".join(wrong)


def _difference(op: str, want: Any, got: torch.Tensor | None) -> str | None:
    if got is None:  # nobody asks for it
        return None
    want = want.detach()
    if got.numel() and not want.numel():  # statistics that the CPU kernel leaves empty, unlike the Meta kernel
        return None
    if tolerances.loose(op) == "first":  # their dtype depends on the device
        got = got.to(want.dtype)
    return difference(op, Outcome(want), Outcome(got), rule=True)


def lower(op: torch._ops.OpOverload, *args: Any, lift: frozenset[int] | None = None, **kwargs: Any) -> Results:
    """Runs an operator through its lowering; tensors in, tensors out.

    Args:
        op: Operator overload, for example ``torch.ops.aten.add.Tensor``.
        *args: Its arguments.
        lift: Arguments whose numbers are inputs of the program; by default those of type Scalar. Those that no program
            can be made with are constants.
        **kwargs: Keyword arguments.
    """
    one = Call(op, args, kwargs)
    ((results,),) = _lowered([one], [[one.positions(SCALARS) if lift is None else lift]])
    return results


def _flat(results: Any) -> list[Any]:
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    return [y for x in results for y in (x if isinstance(x, (tuple, list)) else [x])]


def _promised(one: Call) -> list[Meta | None]:
    """The results' shapes and dtypes."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (one.args, one.kwargs))
    kwargs = {k: torch.device("meta") if isinstance(v, torch.device) else v for k, v in kwargs.items()}
    try:
        results = one.op(*args, **kwargs)
    except NotImplementedError:
        # Without a meta kernel only the CPU kernel tells shapes and dtypes.
        results = one.op(*one.args, **one.kwargs)
    result = _flat(requested_results(one.op, one.args, results))
    return [Meta(tuple(m.shape), m.dtype) if isinstance(m, torch.Tensor) else None for m in result]


def _lowered(calls: Sequence[Call], lifts: Sequence[Sequence[frozenset[int]]]) -> list[list[Results]]:
    """For each call what each choice of inputs gives, all compiled as one program."""
    programs: list[Any] = []
    given: list[Any] = []
    places: list[tuple[Call, list[Meta | None], int]] = []
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        seed = seed_words(7, 3)
        for one, choices in zip(calls, lifts, strict=True):
            outs = _promised(one)
            seeded = seed if torch.Tag.nondeterministic_seeded in one.op.tags else None
            try:
                with mock.patch.object(call_module, "passed_over", _refuse):
                    # Those that end up with the same inputs are one program.
                    traced = {lift: part for lift, *part in (_traced(one, lift, outs, seeded) for lift in choices)}
            except Exception as error:
                error.add_note(f"in {one}")
                raise
            places.append((one, outs, len(traced)))
            programs += [program for program, _ in traced.values()]
            given += [arrays for _, arrays in traced.values()]
        result = iter(jax.jit(lambda all: [run(own) for run, own in zip(programs, all, strict=True)])(given))
        return [
            [
                [
                    None if m is None else fallback.from_numpy(np.asarray(v), m.dtype)
                    for v, m in zip(next(result), outs, strict=True)
                ]
                for _ in range(ways)
            ]
            for _, outs, ways in places
        ]


def _traced(
    one: Call, lift: frozenset[int], outs: list[Meta | None], seed: Any
) -> tuple[frozenset[int], Any, list[Any]]:
    """The arguments whose numbers turn out to be inputs, the program, which JAX has traced, and its inputs."""
    op = one.op
    positional, keywords = bind(op, one.args, one.kwargs)
    varied = not lift <= one.positions(SCALARS)
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

    def program(values: list[Any]) -> Any:
        def fill(x: Any) -> Any:
            if isinstance(x, list):
                return [fill(e) for e in x]
            if x[0] == "array":
                return values[x[1]]
            return NumberInput(values[x[1]], x[2], str(op), x[3], varied) if x[0] == "lifted" else x[1]

        return call_module.call(
            op, [fill(a) for a in template[0]], {k: fill(v) for k, v in template[1].items()}, outs, seed
        )

    jitted = jax.jit(program)
    try:
        jitted.trace(arrays)
    except StaticNumbers as static:
        rest = lift.difference(lift if static.arguments is None else static.arguments)
        assert rest != lift, f"{op} asks for {static.arguments}, which it has"
        return _traced(one, rest, outs, seed)
    return lift, jitted, arrays


def _refuse(op: torch._ops.OpOverload, error: Exception) -> None:
    raise AssertionError(f"the lowering of {op} did not take these arguments") from error
