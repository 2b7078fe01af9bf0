"""Collectives of a job with one process: what they give, without a graph operation where none is needed.

`torch_xla.core.xla_model` has them under their public names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._api import sync
from torch_xla._errors import listing, message

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"

_REDUCTIONS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)

Tensors = torch.Tensor | list[torch.Tensor]
Groups = list[list[int]] | None


def _check_groups(name: str, groups: Groups) -> None:
    if groups and sorted(itertools.chain.from_iterable(groups)) != [0]:
        raise ValueError(
            message(name, f"groups={groups}", expected="[[0]] or None", do="the job has one process, with ordinal 0")
        )


def _check_reduction(name: str, kind: str) -> None:
    if kind not in _REDUCTIONS:
        raise ValueError(message(name, f"reduce_type={kind!r}", expected=listing(_REDUCTIONS)))


def _check_tensors(name: str, argument: str, value: Any) -> None:
    if isinstance(value, list | tuple) and all(isinstance(item, torch.Tensor) for item in value):
        return
    raise TypeError(
        message(name, f"`{argument}` needs to be a Tensor or a list of Tensors, but given {type(value).__name__}")
    )


def _deliver(name: str, value: Any, output: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies ``convert`` to a tensor or to each of a list, into ``output`` where that is given."""
    if isinstance(value, torch.Tensor):
        if output is None:
            return convert(value)
        return output.copy_(convert(value))
    argument = "input" if name.startswith("reduce") else "value"
    _check_tensors(name, argument, value)
    if output is None:
        return [convert(item) for item in value]
    if not isinstance(output, list) or not all(isinstance(item, torch.Tensor) for item in output):
        raise TypeError(message(name, f"`output` needs to be a list of Tensors, but given {type(output).__name__}"))
    if len(output) != len(value):
        raise ValueError(message(name, f"`output` length doesn't match `input` length: {len(output)} vs {len(value)}"))
    for target, item in zip(output, value, strict=True):
        target.copy_(convert(item))
    return output


def _scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """A new tensor of the same type, as a reduction over several processes gives one."""
    return tensor.clone() if scale == 1.0 else (tensor * scale).to(tensor.dtype)


def all_reduce(
    reduce_type: str,
    inputs: Tensors,
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Tensors:
    """Reduces tensors over all processes.

    Args:
        reduce_type: One of the ``REDUCE_`` constants.
        inputs: A tensor, or a list of tensors to be reduced in place.
        scale: Factor applied to the result.
        groups: Lists of ordinals that reduce among themselves; one group of all by default.
        pin_layout: Accepted for compatibility.

    Returns:
        A new tensor, or the list that was given.
    """
    _check_reduction("all_reduce", reduce_type)
    _check_groups("all_reduce", groups)
    if isinstance(inputs, torch.Tensor):
        return _scaled(inputs, scale)
    _check_tensors("all_reduce", "inputs", inputs)
    if scale != 1.0:
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(_scaled(tensor, scale))
    return inputs


def all_gather(
    value: Tensors,
    dim: int = 0,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Tensors:
    """Concatenates the tensors of all processes along a dimension.

    Args:
        value: A tensor or a list of tensors.
        dim: The dimension, counted from the end if negative.
        groups: Lists of ordinals that gather among themselves; one group of all by default.
        output: Where to put the result: a tensor or a list as ``value``.
        pin_layout: Accepted for compatibility.
        channel_id: Accepted for compatibility.
        use_global_device_ids: Accepted for compatibility.

    Returns:
        New tensors, or ``output``.
    """
    _check_groups("all_gather", groups)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        if not -max(tensor.dim(), 1) <= dim < max(tensor.dim(), 1):
            raise IndexError(
                message("all_gather", f"dim={dim}", expected=f"a dimension of a {tensor.dim()}-dimensional tensor")
            )
        return tensor.clone()

    return _deliver("all_gather", value, output, gather)


def all_gather_bucketized(
    input_list: list[torch.Tensor],
    dim: int = 0,
    groups: Groups = None,
    output: list[torch.Tensor] | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> Tensors:
    """`all_gather` of a list of tensors, sent in buckets of ``bucket_cap_mb`` MiB.

    Args:
        input_list: The tensors.
        dim: See `all_gather`.
        groups: See `all_gather`.
        output: See `all_gather`.
        pin_layout: Must be False.
        bucket_cap_mb: Size of a bucket in MiB.
    """
    if pin_layout:
        raise RuntimeError(message("all_gather_bucketized", "pin_layout=True", expected="False"))
    _check_tensors("all_gather_bucketized", "input_list", input_list)
    return all_gather(input_list, dim=dim, groups=groups, output=output, pin_layout=pin_layout)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Splits a tensor, sends part ``i`` to process ``i`` and concatenates what arrives.

    Args:
        value: The tensor.
        split_dimension: Dimension to split.
        concat_dimension: Dimension to concatenate along.
        split_count: Number of parts, which is the number of processes of a group.
        groups: Lists of ordinals that exchange among themselves; one group of all by default.
        pin_layout: Accepted for compatibility.
    """
    _check_groups("all_to_all", groups)
    if split_count != 1:
        raise ValueError(message("all_to_all", f"split_count={split_count}", expected="1, the number of processes"))
    return value.clone()


def collective_permute(value: torch.Tensor, pairs: list[list[int]]) -> torch.Tensor:
    """Sends tensors between processes.

    Args:
        value: The tensor to send.
        pairs: Pairs (source ordinal, target ordinal).

    Returns:
        What arrived here, or zeros if nothing did.
    """
    if any(tuple(pair) != (0, 0) for pair in pairs) or len(pairs) > 1:
        raise ValueError(message("collective_permute", f"pairs={pairs}", expected="[[0, 0]] in a job of one process"))
    return value.clone() if pairs else torch.zeros_like(value)


def collective_broadcast(
    tensors: list[torch.Tensor],
    root_ordinal: int = 0,
    groups: list[int] | None = None,
    pin_layout: bool = True,
) -> None:
    """Overwrites tensors with those of one process.

    Args:
        tensors: The tensors, changed in place.
        root_ordinal: The process whose values all get.
        groups: Accepted for compatibility.
        pin_layout: Accepted for compatibility.
    """
    if root_ordinal != 0:
        raise ValueError(
            message("collective_broadcast", f"root_ordinal={root_ordinal}", expected="0 in a job of one process")
        )


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Gives all processes the parameters and buffers of the first one, then issues a barrier."""
    collective_broadcast(list(itertools.chain(model.parameters(), model.buffers())))
    sync()


def reduce_scatter(
    reduce_type: str,
    input: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Tensors:
    """Reduces over all processes and keeps the shard that belongs to this one.

    Args:
        reduce_type: One of the ``REDUCE_`` constants.
        input: A tensor or a list of tensors.
        scale: Factor applied to the result.
        scatter_dim: Dimension that is split.
        shard_count: Number of shards, which is the number of processes of a group.
        groups: Lists of ordinals that work among themselves; one group of all by default.
        output: Where to put the result: a tensor or a list as ``input``.
        pin_layout: Accepted for compatibility.
        channel_id: Accepted for compatibility.
        use_global_device_ids: Accepted for compatibility.

    Returns:
        New tensors, or ``output``.
    """
    _check_reduction("reduce_scatter", reduce_type)
    _check_groups("reduce_scatter", groups)
    if shard_count != 1:
        raise ValueError(message("reduce_scatter", f"shard_count={shard_count}", expected="1, the number of processes"))
    return _deliver("reduce_scatter", input, output, lambda t: _scaled(t, scale))


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> Tensors:
    """`reduce_scatter` of a list of tensors, sent in buckets of ``bucket_cap_mb`` MiB.

    Args:
        reduce_type: See `reduce_scatter`.
        input_list: The tensors.
        scale: See `reduce_scatter`.
        scatter_dim: See `reduce_scatter`.
        shard_count: See `reduce_scatter`.
        groups: See `reduce_scatter`.
        output: See `reduce_scatter`.
        pin_layout: Accepted for compatibility.
        bucket_cap_mb: Size of a bucket in MiB.
    """
    _check_tensors("reduce_scatter_bucketized", "input_list", input_list)
    return reduce_scatter(reduce_type, input_list, scale, scatter_dim, shard_count, groups, output, pin_layout)


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor],
    scale: float,
    groups: Groups,
    pin_layout: bool,
    bucket_cap_mb: int = 0,
) -> None:
    """Sums gradients over all processes in place, bucket by bucket.

    Args:
        gradients: The gradients, in the order in which buckets are filled.
        scale: Factor applied to the sums.
        groups: See `all_reduce`.
        pin_layout: See `all_reduce`.
        bucket_cap_mb: Size of a bucket in MiB; 0 sends each gradient alone.
    """
    bucket: list[torch.Tensor] = []
    filled = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if bucket and filled + size > bucket_cap_mb * 2**20:
            all_reduce(REDUCE_SUM, bucket, scale=scale, groups=groups, pin_layout=pin_layout)
            bucket, filled = [], 0
        bucket.append(gradient)
        filled += size
    if bucket:
        all_reduce(REDUCE_SUM, bucket, scale=scale, groups=groups, pin_layout=pin_layout)


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of all parameters of an optimizer that have one."""
    return [
        param.grad.detach() for group in optimizer.param_groups for param in group["params"] if param.grad is not None
    ]


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True) -> None:
    """Averages the gradients of an optimizer over all processes.

    Args:
        optimizer: The optimizer whose parameters are meant.
        groups: See `all_reduce`.
        pin_layout: See `all_reduce`.
    """
    # The average over one process is what is there.
    _check_groups("reduce_gradients", groups)
