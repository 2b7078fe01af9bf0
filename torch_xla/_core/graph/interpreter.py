"""Runs a cut graph on PyTorch's CPU kernels: the oracle that tells a recording fault from a lowering fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla._core.graph.graph import Graph, Node, fill_template
from torch_xla.ops.call import find_overload
from torch_xla.ops.call_settings import as_recorded
from torch_xla.ops.decompositions import separate
from torch_xla.ops.fallback import results_of, with_tensors
from torch_xla.ops.promotion import promoted


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril() if is_causal else bias
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    debug_mask: bool,
    *,
    scale: float | None,
) -> tuple[Any, ...]:
    q, k, v = (_wide(t) for t in (q, k, v))
    scores = _scores(q, k, bias, is_causal, scale)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    zero = torch.zeros((), dtype=torch.int64)
    return out, scores.logsumexp(-1), None, None, q.shape[-2], k.shape[-2], zero, zero, None


# Written out: a value may be read where autograd is switched off.
def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, *rest: Any, scale: float | None
) -> tuple[Any, ...]:
    grad, q, k, v = (_wide(t) for t in (grad, q, k, v))
    groups, factor = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    p = torch.softmax(_scores(q, k, bias, rest[-3], scale), -1).nan_to_num(0.0)
    grad_p = grad @ v.repeat_interleave(groups, 1).mT
    grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
    ungroup = lambda g, like: g.unflatten(1, (like.shape[1], groups)).sum(2)  # noqa: E731
    grad_q = grad_scores @ k.repeat_interleave(groups, 1) * factor
    grad_k = ungroup(grad_scores.mT @ q * factor, k)
    grad_bias = None if bias is None else grad_scores.sum_to_size(bias.shape)
    return grad_q, grad_k, ungroup(p.mT @ grad, v), grad_bias


def _linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    rows = _wide(grad).flatten(0, -2) if grad.ndim > 1 else _wide(grad)[None]
    grad_x = (rows @ _wide(weight)).view(x.shape) if output_mask[0] else None
    if not any(output_mask[1:]):
        return grad_x, None, None
    return grad_x, rows.mT @ _wide(x).reshape(len(rows), x.shape[-1]), rows.sum(0)


# Its kernel asks for strides that the value of a node may not have.
def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None, bias: None, out_dtype: None
) -> torch.Tensor:
    a, b = _wide(a), _wide(b)
    if ends is None:
        return a @ b
    stops = ends.tolist()
    stretches = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in stretches])
    if a.dim() == 3:
        return _grouped_mm(b.mT, a.mT, ends, None, None).mT
    out = a.new_zeros(a.shape[0], b.shape[2])
    for rows, own in zip(stretches, b, strict=True):
        out[rows] = a[rows] @ own
    return out


# Operators that PyTorch leaves to other devices, or that its CPU takes in fewer layouts.
_BY_PARTS: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "aten.linear_backward.default": _linear_backward,
    "aten._scaled_dot_product_fused_attention_overrideable.default": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default": _attention_backward,
}


def _cast(x: Any, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype)


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Gradients that the CPU's kernels give as sparse tensors are dense on this device."""
    return value if value.layout == torch.strided else value.to_dense()


def call(node: Node, tensors: list[Any]) -> list[Any]:
    """The results of a node by its CPU kernel, of CPU tensors, which stay as they are; numbers are as they were cut."""
    op = find_overload(node.op)
    values = fill_template(node, tensors, lambda number: number.value)
    values = [torch.device("cpu") if isinstance(v, torch.device) else v for v in values]
    with as_recorded(node.settings):
        values = promoted(op, values, node.outs, lambda x: getattr(x, "dtype", None), _cast)
    positional, keywords = separate(op, values)
    # A node stands for a value, so an operator that writes must not reach its input's.
    if op._schema.is_mutable:
        positional, keywords = pytree.tree_map_only(torch.Tensor, torch.clone, (positional, keywords))
    with as_recorded(node.settings):
        returned = _BY_PARTS.get(node.op, op)(*with_tensors(op, positional), **keywords)
    if op._schema.is_mutable:
        return results_of(op, returned, positional, keywords)
    flat: list[Any] = pytree.tree_leaves(returned)  # an operator may return several lists
    return flat


def interpret(graph: Graph, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A graph's outputs, as contiguous CPU tensors, of a CPU tensor for each leaf; numbers are as they were cut.

    Raises NotImplementedError where it draws random numbers, which no other device repeats.
    """
    results: list[list[torch.Tensor | None]] = []
    with torch.no_grad():
        for node in graph.nodes:
            if node.seeded:
                raise NotImplementedError(f"[interpret] {node.op} draws random numbers; seedless graphs only")
            tensors = [leaves[w.slot] if w.leaf else results[w.slot][w.result] for w in node.inputs]
            flat = call(node, tensors)
            results.append(
                [
                    None
                    if meta is None or value is None
                    else _dense(value).to(meta.dtype).clone(memory_format=torch.contiguous_format)
                    for value, meta in zip(flat, node.outs, strict=True)
                ]
            )
    return [results[slot][result] for slot, result in graph.outputs]  # type: ignore[misc]
