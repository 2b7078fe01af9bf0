"""A function applied to slice after slice of tensors: one loop in the program, however many slices there are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._functorch.partitioners import default_partition
from torch.utils import _pytree as pytree

from torch_xla._core import scan as loops
from torch_xla._core.pure import Operator, signature
from torch_xla._errors import message

_Found = tuple[Operator, Any, Any]
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
            structure, shapes and dtypes, and a nest of tensors (or None) to be stacked. It writes to none of them.
        init: What the first turn is given.
        xs: A nest of tensors on an XLA device, of a common first size of at least 1.
        partition_fn: What splits a turn into what is kept for the gradients and what is computed again, as
            `functorch.compile.default_partition` and `min_cut_rematerialization_partition` do.
        is_fn_pure: Whether `fn` depends on its arguments alone; then it is traced once per signature.

    Returns:
        What the last turn carried, and the stacks.

    Raises:
        ValueError: `fn` cannot be called, or the first sizes differ.
        RuntimeError: `fn` changes the structure, shape or dtype of what it carries, writes to an argument, or uses a
            tensor from outside that requires a gradient.
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
    known = _SCAN_COMPUTATION_CACHE.setdefault(fn, {}) if is_fn_pure else {}
    key = (signature(tensors, (of_carry, of_slices), "scan"), partition_fn)
    if key not in known:
        known[key] = _operator(fn, carry, of_carry, slices, of_slices, partition_fn)
    operator, of_stacks, absent = known[key]
    found = operator(tensors)
    stacks = list(found[len(carry) :])
    for position in absent:
        stacks.insert(position, None)  # type: ignore[arg-type]
    return pytree.tree_unflatten(found[: len(carry)], of_carry), pytree.tree_unflatten(stacks, of_stacks)


def _operator(
    fn: Callable[..., Any],
    carry: list[torch.Tensor],
    of_carry: Any,
    slices: list[torch.Tensor],
    of_slices: Any,
    partition: Callable[..., Any],
) -> _Found:
    of_stacks = None
    absent: list[int] = []

    def turn(*values: torch.Tensor) -> list[torch.Tensor]:
        nonlocal of_stacks, absent
        x = pytree.tree_unflatten(list(values[len(carry) :]), of_slices)
        after, y = fn(pytree.tree_unflatten(list(values[: len(carry)]), of_carry), x)
        carried, structure = pytree.tree_flatten(after)
        got = [(tuple(c.shape), c.dtype) if isinstance(c, torch.Tensor) else c for c in carried]
        given = [(tuple(c.shape), c.dtype) for c in carry]
        if structure != of_carry or got != given:
            raise RuntimeError(message("scan", f"fn returned the carry {got}", expected=f"that of init, {given}"))
        stacked, of_stacks = pytree.tree_flatten(y, is_leaf=lambda leaf: leaf is None)
        absent = [i for i, leaf in enumerate(stacked) if leaf is None]
        return [*carried, *(leaf for leaf in stacked if leaf is not None)]

    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (*carry, *slices))
    return loops.operator(turn, carry, slices, (), "scan", gradients, partition), of_stacks, absent
