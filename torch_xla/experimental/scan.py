"""A function applied to slice after slice of tensors: one loop in the program, however many slices there are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from torch_xla._core.functions import scan_operator as loops
from torch_xla._core.functions import tracing
from torch_xla._core.functions.pure import Operator, signature
from torch_xla._errors import message
from torch_xla._torch_internals import default_partition, pytree

_Found = tuple[Operator, Callable[[Any], Any]]
_SCAN_COMPUTATION_CACHE: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, _Found]] = (
    weakref.WeakKeyDictionary()
)


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Calls ``carry, y = fn(carry, x)`` for each slice of `xs` along the first dimension, with gradients.

    Compile time does not grow with the number of slices. Tensors that `fn` uses from outside are inputs of the loop and
    get no gradients. Random operators draw other numbers in each turn.

    Args:
        fn: Takes a nest of carried tensors and one of slices; returns the carried tensors of the next turn, of the same
            structure, shapes and dtypes, and a nest of tensors (or None) to be stacked. It may write to what it is
            given, which are the turn's own tensors, unless gradients are wanted.
        init: What the first turn is given.
        xs: A nest of tensors on an XLA device, of a common first size of at least 1.
        partition_fn: What splits a turn into what is kept for the gradients and what is computed again, as
            `functorch.compile.default_partition` and `min_cut_rematerialization_partition` do.
        is_fn_pure: Whether `fn` depends on its arguments alone; then it is traced once per signature.

    Returns:
        What the last turn carried, and the stacks.

    Raises:
        ValueError: `fn` cannot be called, or the first sizes differ.
        RuntimeError: `fn` changes the structure, shape or dtype of what it carries, writes to a tensor from outside (or
            to an argument where gradients are wanted), or uses a tensor from outside that requires a gradient.
    """
    if not callable(fn):
        raise ValueError(message("scan", f"fn {fn!r} must be callable"))
    slices, of_slices = pytree.tree_flatten(xs)
    carry, of_carry = pytree.tree_flatten(init)
    tensors = [*carry, *slices]
    for leaf in tensors:
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(message("scan", f"got {type(leaf).__name__} {leaf!r}", expected="tensors in init and xs"))
    sizes = {len(x) for x in slices}
    if len(sizes) != 1 or 0 in sizes:
        got = f"xs has the leading dimension sizes {sorted(sizes)}" if sizes else "xs has no tensors"
        raise ValueError(message("scan", got, expected="the same leading dimension size everywhere, at least 1"))
    cache = _SCAN_COMPUTATION_CACHE.setdefault(fn, {}) if is_fn_pure else {}
    key = (signature(tensors, (of_carry, of_slices), "scan"), partition_fn)
    if key not in cache:
        cache[key] = _operator(fn, carry, of_carry, slices, of_slices, partition_fn)
    operator, stacks_of = cache[key]
    results = operator(tensors)
    return pytree.tree_unflatten(results[: len(carry)], of_carry), stacks_of(results[len(carry) :])


def _operator(
    fn: Callable[..., Any],
    carry: list[torch.Tensor],
    of_carry: Any,
    slices: list[torch.Tensor],
    of_slices: Any,
    partition: Callable[..., Any],
) -> _Found:
    turn = _ScanStep(fn, carry, of_carry, of_slices)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*carry, *slices))
    function = turn if gradients else turn.on_copies
    operator = loops.operator(function, carry, slices, (), "scan", gradients, partition)
    return operator, turn.stacks_of


class _ScanStep:
    """A turn as a function of flat tensors; after a call, `stacks_of` makes the nest that it returned of other ones."""

    def __init__(self, fn: Callable[..., Any], carry: list[torch.Tensor], of_carry: Any, of_slices: Any) -> None:
        self._fn, self._of_carry, self._of_slices = fn, of_carry, of_slices
        self._types = [(tuple(c.shape), c.dtype) for c in carry]
        self.stacks_of: Callable[[Any], Any] = list

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        count = len(self._types)
        x = pytree.tree_unflatten(list(values[count:]), self._of_slices)
        after, y = self._fn(pytree.tree_unflatten(list(values[:count]), self._of_carry), x)
        carried, structure = pytree.tree_flatten(after)
        got = [(tuple(c.shape), c.dtype) if isinstance(c, torch.Tensor) else c for c in carried]
        if structure != self._of_carry or got != self._types:
            raise RuntimeError(message("scan", f"fn returned the carry {got}", expected=f"that of init, {self._types}"))
        stacked, self.stacks_of = tree_flatten_none(y)
        return [*carried, *stacked]

    def on_copies(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """As a call, of a function that may write to its arguments; XLA makes no copies of them."""
        return self(*(value.clone() for value in values))


def tree_flatten_none(tree: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The leaves of a nest that are not None, and a function that makes the nest of such leaves again."""
    leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda leaf: leaf is None)
    absent = [leaf is None for leaf in leaves]

    def unflatten(flat: Any) -> Any:
        remaining = iter(flat)
        return pytree.tree_unflatten([None if none else next(remaining) for none in absent], spec)

    return [leaf for leaf in leaves if leaf is not None], unflatten


def value_and_grad_partitioned(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_fn_pure: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """One turn of a scan and its gradients as two functions of tensors, for loops of one's own.

    Args:
        fn: As for `scan`.
        init: As for `scan`.
        xs: As for `scan`; one slice is traced.
        partition_fn: As for `scan`.
        is_fn_pure: Not used: each call traces `fn` once.

    Returns:
        ``forward(carry, x)`` returns ``(carry, (y, residuals))``, where `residuals` are tensors that `backward`
        needs; ``alias_input(residuals, x)`` adds those that are tensors of `x`, also for stacks of both; and
        ``backward(grad_of_carry, (grad_of_y, all_kept))`` returns the gradients of `carry` and `x`, with None for those
        that do not require one.
    """
    carry, of_carry = pytree.tree_flatten(init)
    slices, of_slices = pytree.tree_flatten(xs)
    count = len(carry)
    inputs = [*carry, *(x.new_empty(x.shape[1:]) for x in slices)]
    grad_indices = [i for i, c in enumerate(carry) if c.is_floating_point() or c.is_complex()]
    grad_indices += [count + i for i, x in enumerate(slices) if x.requires_grad]
    turn = _ScanStep(fn, carry, of_carry, of_slices)
    with torch.enable_grad():
        halves = tracing.split(turn, inputs, grad_indices, "scan", partition_fn)
    aliases = [i - count if kind == "input" and count <= i < len(inputs) else None for kind, i in halves.saved]

    def forward(carry: Any, x: Any) -> Any:
        operands = [*pytree.tree_leaves(carry), *pytree.tree_leaves(x), *halves.outside]
        results = halves.forward(*operands)
        saved = [operands[i] if kind == "input" else results[i] for kind, i in halves.saved]
        residuals = tuple(value for value, alias in zip(saved, aliases, strict=True) if alias is None)
        ys = turn.stacks_of(results[count : halves.count])
        return pytree.tree_unflatten(results[:count], of_carry), (ys, residuals)

    def alias_input(residuals: Any, x: Any) -> tuple[torch.Tensor, ...]:
        of_x, rest = pytree.tree_leaves(x), iter(residuals)
        return tuple(next(rest) if alias is None else of_x[alias] for alias in aliases)

    def backward(grad_of_carry: Any, of_y: Any) -> Any:
        grad_of_y, residuals = of_y
        grads = [*pytree.tree_leaves(grad_of_carry), *tree_flatten_none(grad_of_y)[0]]
        assert halves.backward is not None
        of_inputs = halves.backward(*residuals, *(grads[i] for i in halves.tangents))
        results = dict(zip(halves.grad_inputs, of_inputs, strict=True))
        flat = [results.get(i) for i in range(len(inputs))]
        return pytree.tree_unflatten(flat[:count], of_carry), pytree.tree_unflatten(flat[count:], of_slices)

    return forward, alias_input, backward
