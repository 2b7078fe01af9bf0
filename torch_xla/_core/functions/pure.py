"""Traces a function once per signature, and records it as one operator, with its gradients as another.

`assume_pure(f)(x)` with `f = lambda x: x.sin().cos()` records one node `xla::program` in place of two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torch_xla._core.compile.settings import process_settings
from torch_xla._core.functions import jax_functions, tracing
from torch_xla._errors import message
from torch_xla._torch_internals import pytree


@dataclass(frozen=True)
class Operator:
    """A function of tensors as one recorded operator."""

    forward: str  # name of the program of the inputs, `outside` and, if `seeded`, a seed
    # name of the one from `saved` values and gradients of `tangents` to those of `grad_inputs`; None if none
    backward: str | None
    outside: list[torch.Tensor]  # tensors that the function had from elsewhere
    seeded: bool  # whether it draws random numbers
    count: int  # of results; what else the program returns is saved for the gradients
    saved: list[tuple[str, int]]  # where the saved values come from: ``("input", i)`` or ``("result", i)``
    tangents: list[int]  # results that have gradients
    grad_inputs: list[int]  # inputs for which `backward` returns gradients

    def __call__(self, tensors: Sequence[torch.Tensor], seed: Any = None) -> list[torch.Tensor]:
        """Records a call; random operators draw from `seed`, by default from what the device's generator gives."""
        inputs = [*tensors, *self.outside]
        if self.seeded:
            device = next(x.device for x in inputs if x.device.type == "xla")
            if seed is None:
                seed = torch.randint(0, 2**63 - 1, (), device=device)
            elif not isinstance(seed, torch.Tensor):
                seed = torch.full((), seed, dtype=torch.int64, device=device)
            inputs.append(seed.to(device, torch.int64).reshape(()))
        return (
            list(_Call.apply(self, *inputs))
            if self.backward
            else jax_functions.call(self.forward, inputs)[: self.count]
        )


class _Call(torch.autograd.Function):
    """A call whose gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = jax_functions.call(operator.forward, inputs)
        ctx.operator = operator
        ctx.save_for_backward(*((inputs if kind == "input" else results)[i] for kind, i in operator.saved))
        outs = results[: operator.count]
        ctx.mark_non_differentiable(*(out for i, out in enumerate(outs) if i not in operator.tangents))
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operator = ctx.operator
        operands = [*ctx.saved_tensors, *(grads[i] for i in operator.tangents)]
        of_inputs = dict(zip(operator.grad_inputs, jax_functions.call(operator.backward, operands), strict=True))
        return None, *(of_inputs.get(i) for i in range(len(ctx.needs_input_grad) - 1))


def draws(halves: tracing.Halves) -> bool:
    """Whether a function draws random numbers."""
    from torch_xla._core.functions import fx

    return any(fx.draws(node) for node in halves.forward.graph.nodes)


def operator_of(
    halves: tracing.Halves,
    label: str,
    forward: tuple[Callable[..., Any], Sequence[torch.Tensor]],
    backward: tuple[Callable[..., Any], Sequence[torch.Tensor]],
    saved: list[tuple[str, int]],
    reached: list[int],
) -> Operator:
    """The operator whose programs are the halves of a function, each as a JAX function and the tensors it takes.

    `forward` takes what the function has from outside, and a seed if it draws, after its tensors; `saved` and `reached`
    are the operator's `saved` and `grad_inputs`.
    """
    seeded = draws(halves)
    seed = [torch.empty((), dtype=torch.int64)] if seeded else []
    name = jax_functions.trace(forward[0], jax_functions.metas_of([*forward[1], *halves.outside, *seed]), label)
    gradients = None
    if halves.backward is not None:
        gradients = jax_functions.trace(backward[0], jax_functions.metas_of(backward[1]), f"{label}_backward")
    return Operator(name, gradients, halves.outside, seeded, halves.count, saved, halves.tangents, reached)


def signature(leaves: Sequence[Any], spec: Any, area: str) -> Hashable:
    """The key of a traced function: all it depends on beside the tensors' values; TypeError if not hashable."""
    fixed = tuple(
        (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else jax_functions.constant(x)
        for x in leaves
    )
    grad_mask = (
        tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves) if torch.is_grad_enabled() else None
    )
    types = (torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla"))
    try:
        hash(fixed)
    except TypeError as error:
        got = f"an argument cannot be told from others: {error}"
        raise TypeError(message(area, got, expected="tensors and hashable values")) from error
    return fixed, spec, grad_mask, types, process_settings()


class Pure:
    """A function of any nest of tensors without side effects; other values among its arguments must be hashable.

    `area` is the tag of its errors.
    """

    def __init__(self, function: Callable[..., Any], area: str) -> None:
        self._function = function
        self._area = area
        self._compiled: dict[Hashable, tuple[Operator, Any, dict[int, Any]]] = {}

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], state: Hashable = None, seed: Any = None) -> Any:
        """Records a call; `state` is what else the function depends on, `seed` as in `Operator`."""
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if tracing.is_tracing() or not any(x.device.type == "xla" for x in tensors):
            return self._function(*args, **kwargs)
        key = (signature(leaves, spec, self._area), state)
        entry = self._compiled.get(key)
        if entry is None:
            entry = self._compiled[key] = self._compile(leaves, spec, tensors)
        operator, structure, constants = entry
        flat: list[Any] = operator(tensors, seed)
        for position, value in sorted(constants.items()):
            flat.insert(position, value)
        return pytree.tree_unflatten(flat, structure)

    def _compile(
        self, leaves: list[Any], spec: Any, tensors: list[torch.Tensor]
    ) -> tuple[Operator, Any, dict[int, Any]]:
        """The function's operator for a signature; the structure of its results, and those that are no tensors."""
        from torch_xla._core.functions import fx

        structure = None
        constants: dict[int, Any] = {}

        def function(*values: torch.Tensor) -> list[torch.Tensor]:
            nonlocal structure
            arguments = iter(values)
            filled = [next(arguments) if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(filled, spec)
            flat, structure = pytree.tree_flatten(self._function(*args, **kwargs))
            constants.update({i: x for i, x in enumerate(flat) if not isinstance(x, torch.Tensor)})
            return [x for x in flat if isinstance(x, torch.Tensor)]

        grad_positions = [i for i, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []
        halves = tracing.split(function, tensors, grad_positions, self._area)
        seeded = draws(halves)

        def forward(*arrays: Any) -> list[Any]:
            inputs, seed = (arrays[:-1], arrays[-1]) if seeded else (arrays, None)
            return fx.function_of(halves.forward)(*inputs, seed=seed)

        def gradients(*arrays: Any) -> list[Any]:
            return [x for x in fx.function_of(halves.backward)(*arrays) if x is not None]  # type: ignore[arg-type]

        arguments: list[torch.Tensor] = []
        reached: list[int] = []
        if halves.backward is not None:
            arguments = [node.meta["val"] for node in tracing.placeholders(halves.backward)]
            grad_nodes = tracing.results(halves.backward)
            reached = [i for i, grad in zip(halves.grad_inputs, grad_nodes, strict=True) if grad is not None]
        label = getattr(self._function, "__name__", self._area)
        operator = operator_of(halves, label, (forward, tensors), (gradients, arguments), halves.saved, reached)
        return operator, structure, constants
