"""Rules for recurrent layers: LSTM, GRU and plain RNN as one scan per layer and direction, with a reversed scan back.

Only ``h @ W_hh^T`` and what is pointwise stays inside a scan. Products with the inputs, and all gradients by weights,
are single products over all steps. The backward keeps nothing but the states after each step; gates are computed again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.matmul import contract
from torch_xla.ops.registry import Context, lowers

Arrays = list[jax.Array]
MaybeArray = jax.Array | None
State = tuple[jax.Array, ...]
# (gates from the input, gates from the hidden state, state before) -> state after, its hidden part not projected yet
Pointwise = Callable[[jax.Array, jax.Array, State], State]


def _lstm(from_input: jax.Array, from_hidden: jax.Array, state: State) -> State:
    enter, forget, cell, leave = jnp.split(from_input + from_hidden, 4, axis=-1)
    cell_state = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(enter) * jnp.tanh(cell)
    return jax.nn.sigmoid(leave) * jnp.tanh(cell_state), cell_state


def _gru(from_input: jax.Array, from_hidden: jax.Array, state: State) -> State:
    (reset_i, update_i, new_i), (reset_h, update_h, new_h) = (
        jnp.split(x, 3, axis=-1) for x in (from_input, from_hidden)
    )
    new = jnp.tanh(new_i + jax.nn.sigmoid(reset_i + reset_h) * new_h)
    return (new + jax.nn.sigmoid(update_i + update_h) * (state[0] - new),)


def _tanh(from_input: jax.Array, from_hidden: jax.Array, state: State) -> State:
    return (jnp.tanh(from_input + from_hidden),)


def _relu(from_input: jax.Array, from_hidden: jax.Array, state: State) -> State:
    # Not `maximum`, whose gradient at 0 is one half.
    return (jax.nn.relu(from_input + from_hidden),)


_POINTWISE: dict[str, Pointwise] = {"lstm": _lstm, "gru": _gru, "tanh": _tanh, "relu": _relu}


@dataclass(frozen=True)
class _Cell:
    """One layer in one direction."""

    pointwise: Pointwise  # the step behind the products
    reverse: bool  # whether it reads the sequence from its end
    present: MaybeArray  # which elements ``[T, B, 1]`` belong to a sequence; None for all
    w_ih: jax.Array
    w_hh: jax.Array
    biases: tuple[jax.Array, ...]  # both, or none
    w_hr: MaybeArray  # of the projection

    def from_input(self, x: jax.Array) -> jax.Array:
        """Gates from the input, of all steps."""
        return _linear(x, self.w_ih, self.biases[0] if self.biases else None)

    def from_hidden(self, hidden: jax.Array) -> jax.Array:
        """Gates from the hidden state, of one step or of all."""
        return _linear(hidden, self.w_hh, self.biases[1] if self.biases else None)

    def project(self, hidden: jax.Array) -> jax.Array:
        """The hidden state as it leaves the cell."""
        return hidden if self.w_hr is None else _linear(hidden.astype(self.w_hr.dtype), self.w_hr)

    def forward(self, x: jax.Array, state: State) -> tuple[State, State]:
        """State after the last step, and after each."""
        steps = (self.from_input(x), self.present)
        dtype = x.dtype

        def step(before: State, at: Any) -> tuple[State, State]:
            from_input, present = at
            hidden, *rest = self.pointwise(from_input, self.from_hidden(before[0].astype(dtype)), before)
            after = (_round(self.project(hidden), dtype), *rest)
            if present is not None:
                after = tuple(jnp.where(present, a, b) for a, b in zip(after, before, strict=True))
            return after, after

        return lax.scan(step, state, steps, reverse=self.reverse)

    def backward(self, x: jax.Array, state: State, after: State, grad_last: State, grad_hidden: jax.Array) -> _Grads:
        """Gradients, from those of the last state and of each step's hidden state."""
        before = tuple(_shift(s, first, self.reverse) for s, first in zip(after, state, strict=True))
        hidden_before = before[0].astype(x.dtype)
        steps = (self.from_input(x), self.from_hidden(hidden_before), before, grad_hidden, self.present)

        def step(grad: State, at: Any) -> tuple[State, Any]:
            from_input, from_hidden, before, grad_out, present = at
            (hidden, *_), pull = jax.vjp(self.pointwise, from_input, from_hidden, before)
            grad = (grad[0] + grad_out, *grad[1:])
            grad_projected = grad[0]
            grad_cell = grad_projected
            if self.w_hr is not None:
                grad_cell = contract(grad_projected.astype(x.dtype), self.w_hr, ((1,), (0,)))
            grad_i, grad_h, grad_before = pull((grad_cell, *grad[1:]))
            if present is not None:
                grad_i, grad_h, grad_projected = (jnp.where(present, g, 0) for g in (grad_i, grad_h, grad_projected))
            through = contract(grad_h.astype(x.dtype), self.w_hh, ((1,), (0,)))
            earlier = (grad_before[0] + through, *grad_before[1:])
            if present is not None:
                earlier = tuple(jnp.where(present, e, g) for e, g in zip(earlier, grad, strict=True))
            return earlier, (grad_i, grad_h, (hidden, grad_projected) if self.w_hr is not None else None)

        grad_state, (grad_i, grad_h, projection) = lax.scan(step, grad_last, steps, reverse=not self.reverse)
        narrow_i, narrow_h = grad_i.astype(x.dtype), grad_h.astype(x.dtype)
        weights = [_outer(narrow_i, x), _outer(narrow_h, hidden_before)]
        if self.biases:
            weights += [jnp.sum(grad_i, axis=(0, 1)), jnp.sum(grad_h, axis=(0, 1))]
        if projection is not None:
            weights.append(_outer(projection[1].astype(x.dtype), projection[0].astype(x.dtype)))
        return _Grads(contract(narrow_i, self.w_ih, ((2,), (0,))), grad_state, weights)


@dataclass(frozen=True)
class _Grads:
    """Gradients of one cell."""

    x: jax.Array
    state: State
    weights: Arrays


@dataclass(frozen=True)
class _Net:
    """All layers of an operator."""

    mode: str
    biases: bool
    layers: int
    directions: int  # 1 or 2
    batch_sizes: MaybeArray  # sequences at each step, where the input is packed

    def cells(self, weights: Sequence[jax.Array], present: MaybeArray) -> Iterator[tuple[int, _Cell]]:
        """The layer of each cell, and the cell."""
        count = len(weights) // (self.layers * self.directions)
        for i in range(self.layers * self.directions):
            w_ih, w_hh, *rest = weights[i * count : (i + 1) * count]
            biases, rest = (tuple(rest[:2]), rest[2:]) if self.biases else ((), rest)
            w_hr = rest[0] if rest else None
            reverse = i % self.directions == 1
            yield i // self.directions, _Cell(_POINTWISE[self.mode], reverse, present, w_ih, w_hh, biases, w_hr)

    def places(self, batch: int) -> tuple[jax.Array, jax.Array]:
        """The index of element ``[t, b]`` in packed data, and a mask of the elements that exist."""
        assert self.batch_sizes is not None
        starts = jnp.cumsum(self.batch_sizes) - self.batch_sizes
        sequence = jnp.arange(batch)
        return starts[:, None] + sequence, sequence < self.batch_sizes[:, None]

    def padded(self, x: jax.Array, batch: int) -> tuple[jax.Array, MaybeArray]:
        """Data as ``[T, B, I]``, and which elements of it there are."""
        if self.batch_sizes is None:
            return x, None
        places, present = self.places(batch)
        return jnp.where(present[..., None], x[jnp.minimum(places, len(x) - 1)], 0), present[..., None]

    def packed(self, x: jax.Array, count: int) -> jax.Array:
        """The inverse of `padded`."""
        if self.batch_sizes is None:
            return x
        places, present = self.places(x.shape[1])
        empty = jnp.zeros((count, x.shape[2]), x.dtype)
        return empty.at[jnp.where(present, places, count)].set(x, mode="drop")

    def forward(self, x: jax.Array, state: Arrays, weights: Arrays, mask: MaybeArray) -> Arrays:
        """Output, states after the last step, and the states after each step of each cell."""
        count, wide = len(x), [dtypes.widen(s) for s in state]
        x, present = self.padded(x, state[0].shape[1])
        last: list[State] = []
        after: list[State] = []
        for i, (layer, cell) in enumerate(self.cells(weights, present)):
            if i % self.directions == 0 and layer:
                x = self.between(after[-self.directions :], layer, mask, x.dtype)
            final, each = cell.forward(x, tuple(s[i] for s in wide))
            last.append(final)
            after.append(each)
        output = _joined(after[-self.directions :], x.dtype)
        states = [jnp.stack(s) for s in zip(*last, strict=True)]
        return [self.packed(output, count), *states, *(s for each in after for s in each)]

    def between(self, after: Sequence[State], layer: int, mask: MaybeArray, dtype: Any) -> jax.Array:
        """The input of a layer, from the one before it."""
        x = _joined(after, dtype)
        return x if mask is None else x * mask[layer - 1]

    def backward(
        self, grads: Arrays, x: jax.Array, state: Arrays, weights: Arrays, mask: MaybeArray, saved: Arrays
    ) -> Arrays:
        """Gradients by input, states and weights."""
        count, batch = len(x), state[0].shape[1]
        x, present = self.padded(x, batch)
        wide = [dtypes.widen(s) for s in state]
        width = len(state)
        after = [tuple(dtypes.widen(s) for s in saved[i : i + width]) for i in range(0, len(saved), width)]
        grad_last = [dtypes.widen(g) for g in grads[1:]]
        grad_output = self.padded(dtypes.widen(grads[0]), batch)[0]
        cells = list(self.cells(weights, present))
        done: dict[int, _Grads] = {}
        for layer in reversed(range(self.layers)):
            below = x
            if layer:
                below = self.between(
                    after[(layer - 1) * self.directions : layer * self.directions], layer, mask, x.dtype
                )
            parts = jnp.split(grad_output, self.directions, axis=-1)
            for d, i in enumerate(range(layer * self.directions, (layer + 1) * self.directions)):
                first, last = (tuple(s[i] for s in states) for states in (wide, grad_last))
                done[i] = cells[i][1].backward(below, first, after[i], last, parts[d])
            grad_output = functools.reduce(
                operator.add, (done[layer * self.directions + d].x for d in range(self.directions))
            )
            if layer and mask is not None:
                grad_output = grad_output * mask[layer - 1]
        ordered = [done[i] for i in range(len(done))]
        states = [jnp.stack(s) for s in zip(*(g.state for g in ordered), strict=True)]
        return [self.packed(grad_output, count), *states, *(w for g in ordered for w in g.weights)]


def _linear(x: jax.Array, weight: jax.Array, bias: MaybeArray = None) -> jax.Array:
    out = contract(x, weight, ((x.ndim - 1,), (1,)))
    return out if bias is None else out + bias.astype(out.dtype)


def _outer(grad: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient by a weight, summed over steps and batch."""
    return contract(grad, x, ((0, 1), (0, 1)))


def _round(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in its type with the values that `dtype` holds: the hidden state of a half type is one."""
    return x.astype(dtype).astype(x.dtype)


def _shift(after: jax.Array, first: jax.Array, reverse: bool) -> jax.Array:
    """States before each step, from those after each."""
    return jnp.concatenate([after[1:], first[None]]) if reverse else jnp.concatenate([first[None], after[:-1]])


def _joined(after: Sequence[State], dtype: Any) -> jax.Array:
    """Hidden states of both directions side by side."""
    return jnp.concatenate([each[0] for each in after], axis=-1).astype(dtype)


@lowers("torch_xla.rnn.default")
def _rnn(
    ctx: Context,
    x: jax.Array,
    state: Arrays,
    weights: Arrays,
    batch_sizes: MaybeArray,
    mask: MaybeArray,
    mode: str,
    biases: bool,
    layers: int,
    bidirectional: bool,
) -> Arrays:
    return _Net(mode, biases, layers, 1 + bidirectional, batch_sizes).forward(x, state, weights, mask)


@lowers("torch_xla.rnn_backward.default")
def _rnn_backward(
    ctx: Context,
    grads: Arrays,
    x: jax.Array,
    state: Arrays,
    weights: Arrays,
    batch_sizes: MaybeArray,
    mask: MaybeArray,
    saved: Arrays,
    mode: str,
    biases: bool,
    layers: int,
    bidirectional: bool,
) -> Arrays:
    net = _Net(mode, biases, layers, 1 + bidirectional, batch_sizes)
    return net.backward(grads, x, state, weights, mask, saved)


@lowers("torch_xla.rnn_double_backward.default")
def _rnn_double_backward(
    ctx: Context,
    second: Arrays,
    grads: Arrays,
    x: jax.Array,
    state: Arrays,
    weights: Arrays,
    batch_sizes: MaybeArray,
    mask: MaybeArray,
    mode: str,
    biases: bool,
    layers: int,
    bidirectional: bool,
) -> Arrays:
    net = _Net(mode, biases, layers, 1 + bidirectional, batch_sizes)

    def first(grads: Arrays, x: jax.Array, state: Arrays, weights: Arrays) -> Arrays:
        saved = net.forward(x, state, weights, mask)[1 + len(state) :]
        return net.backward(grads, x, state, weights, mask, saved)

    results, pull = jax.vjp(first, grads, x, state, weights)
    by_grads, by_x, by_state, by_weights = pull([s.astype(r.dtype) for s, r in zip(second, results, strict=True)])
    return [*by_grads, by_x, *by_state, *by_weights]
