"""Tells `DTensor` how to shard attention, which this device does not decompose; it decomposes other layers.

With `torch.distributed.tensor.experimental.context_parallel` the sequence is split too, and PyTorch's ring goes around
with the keys and values of others.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_xla._torch_internals import OpOverload

_FORWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
_BACKWARD = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default
_SEQUENCE = 2


@functools.cache
def install() -> None:
    """Registers the rules; called when there is a mesh, as it imports `DTensor`."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(_FORWARD)(_forward)
    register_sharding(_BACKWARD)(_backward)
    from torch_xla._torch_internals import _math_ops

    # No dimensions in a list mean all; DTensor takes them for none. `norm()` has them on devices PyTorch does not list.
    if (dims := getattr(_math_ops, "_infer_reduction_dims", None)) is not None:
        _math_ops._infer_reduction_dims = lambda given, ndim: None if given in ([], ()) else dims(given, ndim)
    _ring()["custom_ops"].update({_FORWARD: _around, _BACKWARD: _around})  # taken from there in the scope of a ring


def _ring() -> dict[str, Any]:
    """The globals of the module that has `context_parallel`, wherever the installed PyTorch has that."""
    from torch.distributed.tensor.experimental import context_parallel

    return inspect.unwrap(context_parallel).__globals__


def _ways(q: Any, k: Any, v: Any, bias: Any) -> list[tuple[Any, Any, Any]]:
    """Placements of the queries, keys and values, of the bias, and of its gradient."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    strategies: list[tuple[Any, Any, Any]] = [(Replicate(), Replicate(), Replicate())]
    heads = {x.shape[1] for x in (q, k, v)}
    grouped = len(heads) > 1 and any(count % q.mesh.size() for count in heads)
    for dim in (0,) if grouped else (0, 1):
        split = bias is not None and len(bias.shape) == len(q.shape) and bias.shape[dim] > 1
        strategies.append((Shard(dim), Shard(dim) if split else Replicate(), Shard(dim) if split else Partial()))
    return strategies


def _forward(q: Any, k: Any, v: Any, attn_bias: Any = None, *_: Any, **options: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate

    def way(place: Any, bias: Any) -> Any:
        outputs = [place, place, None, None, None, None, Replicate(), Replicate(), None]
        return outputs, [place, place, place, *([] if attn_bias is None else [bias])]

    return [way(place, bias) for place, bias, _ in _ways(q, k, v, attn_bias)]


def _backward(grad: Any, q: Any, k: Any, v: Any, attn_bias: Any, *_: Any, **options: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate

    def way(place: Any, bias: Any, bias_grad: Any) -> Any:
        input_placements = (
            [place] * 4 + ([] if attn_bias is None else [bias]) + [place, place, Replicate(), Replicate()]
        )
        return [place, place, place, None if attn_bias is None else bias_grad], input_placements

    return [way(*places) for places in _ways(q, k, v, attn_bias)]


def _around(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention of a part of the sequence to all of it."""
    from torch.distributed.tensor import DTensor

    names = [argument.name for argument in op._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    query = arguments["query"]
    mesh: DeviceMesh = query.device_mesh
    local = {name: x._local_tensor if isinstance(x, DTensor) else x for name, x in arguments.items()}
    if op is _FORWARD:
        results = _ring()["_templated_ring_attention"](mesh.get_group(), _SEQUENCE, op, **local)
    else:
        results = _ring()["_templated_ring_attention_backward"](
            mesh.get_group(), _SEQUENCE, op, local.pop("grad_out"), "grad_out", **local
        )

    def as_replicated(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return DTensor.from_local(x, mesh, query.placements if x.dim() > _SEQUENCE else None, run_check=False)

    return tuple(map(as_replicated, results))
