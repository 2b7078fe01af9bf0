"""Autograd functions of nests of tensors; PyTorch's own see the tensors among their arguments only."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torch_xla._errors import message
from torch_xla._torch_internals import pytree

F = TypeVar("F", bound=type[torch.autograd.Function])


def pytreeify(cls: F) -> F:
    """Decorates an autograd function whose `forward` and `backward` take and return nests of tensors.

    Args:
        cls: It is changed: `apply` takes and returns nests; `backward` gets gradients in the structure of what
            `forward` returned, and returns them in that of its arguments, a tuple.
    """
    apply, forward, backward = cls.apply, cls.forward, cls.backward

    def flat_forward(ctx: Any, structure: pytree.TreeSpec, results: list[pytree.TreeSpec], *leaves: Any) -> Any:
        out = forward(ctx, *pytree.tree_unflatten(leaves, structure))
        flat, of_results = pytree.tree_flatten(out)
        results.append(of_results)
        ctx._structures = structure, of_results
        return tuple(flat)

    def flat_backward(ctx: Any, *gradients: Any) -> Any:
        structure, of_results = ctx._structures
        output_gradients = pytree.tree_unflatten(gradients, of_results)
        input_gradients = backward(
            ctx, *(output_gradients if isinstance(output_gradients, tuple) else (output_gradients,))
        )
        flat, of_found = pytree.tree_flatten(
            input_gradients if isinstance(input_gradients, tuple) else (input_gradients,)
        )
        if of_found != structure:
            raise RuntimeError(
                message("pytreeify", f"backward returned {of_found}", expected=f"the arguments' structure, {structure}")
            )
        return None, None, *flat

    def nested_apply(*args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        results: list[pytree.TreeSpec] = []
        flat = apply(structure, results, *leaves)
        return pytree.tree_unflatten(flat, results[0])

    for name, function in (("apply", nested_apply), ("forward", flat_forward), ("backward", flat_backward)):
        setattr(cls, name, staticmethod(function))
    return cls
