"""`torch.while_loop` on xla tensors: PyTorch traces condition and body, and the loop is one recorded operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla._core import programs
from torch_xla._errors import message

Tensors = tuple[torch.Tensor, ...]


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Tensors, additional: Tensors) -> Any:
    """Records a loop.

    Args:
        cond_fn: Takes the carried and the additional values and returns one truth value.
        body_fn: Takes the same and returns the carried values of the next turn.
        carried: Tensors to start with, on one XLA device; may be nested in containers.
        additional: Tensors that do not change.

    Raises:
        RuntimeError: The body returns other shapes or dtypes, or another number of values.
    """
    inputs, spec = pytree.tree_flatten((carried, additional))
    start, structure = pytree.tree_flatten(carried)

    def flattened(function: Callable[..., Any]) -> Callable[..., list[Any]]:
        def called(*values: torch.Tensor) -> list[Any]:
            changing, fixed = pytree.tree_unflatten(values, spec)
            return pytree.tree_leaves(function(*changing, *fixed))

        return called

    condition, of_condition = _traced(flattened(cond_fn), inputs)
    body, of_body = _traced(flattened(body_fn), inputs)
    _check(body, start)
    name = _program(condition, body, inputs, len(start), of_condition, of_body)
    return pytree.tree_unflatten(programs.call(name, [*inputs, *of_condition, *of_body]), structure)


def _traced(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A function's graph, whose last inputs are the tensors that it has from outside; and those tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        functional = torch.func.functionalize(function, remove="mutations_and_views")
        module = make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    outside: dict[str, tuple[torch.fx.Node, torch.Tensor]] = {}
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = getattr(module, node.target)
        if not isinstance(value, torch.Tensor):
            continue
        if node.target not in outside:
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(node.target)
            last.meta["val"] = node.meta["val"]
            outside[node.target] = (last, value)
        node.replace_all_uses_with(outside[node.target][0])
        module.graph.erase_node(node)
    device = inputs[0].device
    return module, [value.detach().to(device) for _, value in outside.values()]


def _check(body: torch.fx.GraphModule, start: Sequence[torch.Tensor]) -> None:
    given = [(tuple(t.shape), t.dtype) for t in start]
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    results = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output.args[0]]
    returned = [(tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else ((), type(t)) for t in results]
    if given != returned:
        raise RuntimeError(
            message(
                "while_loop",
                f"the body returned {_listed(returned)}",
                expected=f"what it was given, {_listed(given)}",
                do="convert its results, or start with values of their dtypes",
            )
        )


def _listed(values: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{kind}{list(shape)}" for shape, kind in values)


def _program(
    condition: torch.fx.GraphModule,
    body: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    carried: int,
    of_condition: Sequence[torch.Tensor],
    of_body: Sequence[torch.Tensor],
) -> str:
    from torch_xla._core import fx

    goes_on, turn = fx.as_jax(condition), fx.as_jax(body)

    def function(*arrays: Any) -> list[Any]:
        start, rest = arrays[:carried], arrays[carried:]
        fixed, more = rest[: len(inputs) - carried], rest[len(inputs) - carried :]
        first, second = more[: len(of_condition)], more[len(of_condition) :]
        return fx.while_loop(
            lambda *values: goes_on(*values, *fixed, *first), lambda *values: turn(*values, *fixed, *second), start, ()
        )

    return programs.trace(function, programs.metas_of([*inputs, *of_condition, *of_body]), "while_loop")
