"""Records a function that is applied to slice after slice as one loop, with one for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._core.functions import tracing
from torch_xla._core.functions.pure import Operator, draws, operator_of

Tensors = Sequence[torch.Tensor]


def operator(
    function: Callable[..., Any],
    carry: Tensors,
    xs: Tensors,
    fixed: Tensors,
    area: str,
    gradients: bool,
    partition: tracing.Partition | None = None,
) -> Operator:
    """A loop as an operator of the carried, the sliced and the fixed tensors; fixed ones get no gradients.

    The function takes the carried values, a slice of each of `xs`, whose common first size is that of the loop, and the
    fixed values; it returns, in one list, the carried values of the next turn and what shall be stacked. With
    `gradients` they are wanted for `carry` and those of `xs` that require one; `partition` splits a turn into what is
    kept for them and what is computed again.
    """
    slices = [x.new_empty(x.shape[1:]) for x in xs]
    inputs = [*carry, *slices, *fixed]
    grad_positions = []
    if gradients:
        # What a turn gives the next needs a gradient although what it was first given may need none.
        grad_positions = [i for i, c in enumerate(carry) if c.is_floating_point() or c.is_complex()]
        grad_positions += [len(carry) + i for i, x in enumerate(xs) if x.requires_grad]
    halves = tracing.split(function, inputs, grad_positions, area, partition)
    length = xs[0].shape[0]
    loop = _Loop(halves, len(carry), len(xs), length, draws(halves))
    operands: list[torch.Tensor] = []
    if halves.backward is not None:
        alone = [*map(loop.is_fixed, halves.saved), *(position < len(carry) for position in halves.tangents)]
        nodes = tracing.placeholders(halves.backward)
        operands = [_stacked(node, length, is_stacked) for node, is_stacked in zip(nodes, alone, strict=True)]
    tensors = [*carry, *xs, *fixed]
    return operator_of(halves, area, (loop.forward, tensors), (loop.backward, operands), loop.sources(), loop.reached)


def _stacked(node: torch.fx.Node, length: int, alone: bool) -> torch.Tensor:
    value = node.meta["val"]
    shape = tuple(value.shape) if alone else (length, *value.shape)
    return torch.empty(shape, dtype=value.dtype, device="meta")


class _Loop:
    """The two loops over JAX arrays."""

    def __init__(self, halves: tracing.Halves, carried: int, sliced: int, length: int, seeded: bool) -> None:
        self.halves = halves
        self.length = length
        self.carried = carried
        self.sliced = sliced
        self.seeded = seeded
        # Carried values that the gradients need are stacked too, after the results that are saved.
        self.saved_carries = [i for kind, i in halves.saved if kind == "input" and i < carried]
        self.results = len(tracing.results(halves.forward))
        grad_nodes = [] if halves.backward is None else tracing.results(halves.backward)
        self.grads = dict(zip(halves.grad_inputs, grad_nodes, strict=True))
        self.reached = [i for i in halves.grad_inputs if i < carried or self.grads[i] is not None]

    def is_fixed(self, source: tuple[str, int]) -> bool:
        """Whether a saved value is the same in each turn."""
        return source[0] == "input" and source[1] >= self.carried + self.sliced

    def sources(self) -> list[tuple[str, int]]:
        """The sources of the loop's saved values."""
        places = []
        for kind, i in self.halves.saved:
            if kind == "input" and i < self.carried:
                places.append(("result", self.results + self.saved_carries.index(i)))
            else:
                places.append((kind, i))
        return places

    def forward(self, *arrays: Any) -> list[Any]:
        """Results, saved values of each turn, carried values at the start of each turn."""
        import jax

        from torch_xla._core.functions import fx
        from torch_xla.ops.scan_loop import scan

        carry, xs = arrays[: self.carried], arrays[self.carried : self.carried + self.sliced]
        rest = arrays[self.carried + self.sliced :]
        seed, fixed = (rest[-1], rest[:-1]) if self.seeded else (None, rest)

        function = fx.function_of(self.halves.forward)

        def turn(state: Any, slices: Any) -> Any:
            number, values = state
            turn_seed = None if seed is None else seed + number
            outputs = fx.arrays_of(function(*values, *slices, *fixed, seed=turn_seed))
            after = [a.astype(v.dtype) for a, v in zip(outputs, values, strict=False)]
            return (number + 1, after), (outputs[self.carried :], [values[i] for i in self.saved_carries])

        start = (jax.numpy.asarray(0, "int64"), list(carry))
        (_, last), (stacked, stacked_carry) = scan(turn, start, list(xs), self.length)
        return [*last, *stacked, *stacked_carry]

    def backward(self, *arrays: Any) -> list[Any]:
        """Gradients of `reached`, from the saved values and the gradients of the results."""
        import jax

        from torch_xla._core.functions import fx
        from torch_xla.ops import dtypes
        from torch_xla.ops.scan_loop import scan

        halves = self.halves
        assert halves.backward is not None
        sources = halves.saved
        saved, tangents = arrays[: len(sources)], arrays[len(sources) :]
        fixed = {k: s for k, (s, source) in enumerate(zip(saved, sources, strict=True)) if self.is_fixed(source)}
        sliced = {k: s for k, s in enumerate(saved) if k not in fixed}
        of_carry = {p: g for p, g in zip(halves.tangents, tangents, strict=True) if p < self.carried}
        of_stacks = {p: g for p, g in zip(halves.tangents, tangents, strict=True) if p >= self.carried}
        function = fx.function_of(halves.backward)
        nodes = tracing.placeholders(halves.forward)
        carried = [i for i in halves.grad_inputs if i < self.carried]

        def zeros(i: int) -> Any:
            value = nodes[i].meta["val"]
            return jax.numpy.zeros(tuple(value.shape), dtypes.numpy_dtype(value.dtype))

        def turn(state: Any, slices: Any) -> Any:
            values, of_y = slices
            operands = [fixed[k] if k in fixed else values[k] for k in range(len(sources))]
            operands += [state[p] if p < self.carried else of_y[p] for p in halves.tangents]
            grads = dict(zip(halves.grad_inputs, function(*operands), strict=True))
            before = {i: zeros(i) if grads[i] is None else grads[i] for i in carried}
            return before, [grads[i] for i in self.reached if i >= self.carried]

        start = {i: of_carry.get(i, zeros(i)) for i in carried}
        first, of_slices = scan(turn, start, (sliced, of_stacks), self.length, reverse=True)
        return [*(first[i] for i in carried), *of_slices]
