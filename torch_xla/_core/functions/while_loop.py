"""Records `torch.while_loop` on xla tensors as one operator: PyTorch traces condition and body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._core.functions import jax_functions, tracing
from torch_xla._errors import message
from torch_xla._torch_internals import pytree

Tensors = tuple[torch.Tensor, ...]


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Tensors, additional: Tensors) -> Any:
    """Records a loop of tensors on one XLA device, which may be nested in containers.

    `cond_fn` takes the carried and the additional values, which do not change, and returns one truth value, `body_fn`
    the carried values of the next turn: RuntimeError where these have other shapes or dtypes, or are not as many.
    """
    inputs, spec = pytree.tree_flatten((carried, additional))
    start, structure = pytree.tree_flatten(carried)

    def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*values: torch.Tensor) -> Any:
            changing, fixed = pytree.tree_unflatten(values, spec)
            return function(*changing, *fixed)

        return called

    with torch.no_grad():
        condition = tracing.trace(flattened(cond_fn), inputs)
        body = tracing.trace(flattened(body_fn), inputs)
        for graph in (condition, body):
            tracing.check(graph, "while_loop")
    _check(body.module, start)
    name = _program(condition, body, inputs, len(start))
    return pytree.tree_unflatten(jax_functions.call(name, [*inputs, *condition.outside, *body.outside]), structure)


def _check(body: torch.fx.GraphModule, start: Sequence[torch.Tensor]) -> None:
    start_types = [(tuple(t.shape), t.dtype) for t in start]
    results = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in tracing.results(body)]
    returned = [(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else ((), type(t)) for t in results]
    if start_types != returned:
        raise RuntimeError(
            message(
                "while_loop",
                f"the body returned {_listed(returned)}",
                expected=f"what it was given, {_listed(start_types)}",
                do="convert its results, or start with values of their dtypes",
            )
        )


def _listed(values: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{kind}{list(shape)}" for shape, kind in values)


def _program(
    condition: tracing.TracedFunction, body: tracing.TracedFunction, inputs: Sequence[torch.Tensor], carried: int
) -> str:
    from torch_xla._core.functions import fx

    goes_on, turn = fx.function_of(condition.module), fx.function_of(body.module)

    def function(*arrays: Any) -> list[Any]:
        start, fixed, more = arrays[:carried], arrays[carried : len(inputs)], arrays[len(inputs) :]
        first, second = more[: len(condition.outside)], more[len(condition.outside) :]
        return fx.while_loop(
            lambda *values: goes_on(*values, *fixed, *first), lambda *values: turn(*values, *fixed, *second), start
        )

    return jax_functions.trace(
        function, jax_functions.metas_of([*inputs, *condition.outside, *body.outside]), "while_loop"
    )
