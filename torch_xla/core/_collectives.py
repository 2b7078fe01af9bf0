"""Collectives of the processes of a job; a process alone needs no graph operation for them.

`torch_xla.core.xla_model` has them under their public names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_xla import _config, runtime
from torch_xla._api import sync
from torch_xla._core.functions import collectives
from torch_xla._errors import listing, message
from torch_xla.core import _replicas

REDUCE_SUM = "sum"
REDUCE_MUL = "mul"
REDUCE_AND = "and"
REDUCE_OR = "or"
REDUCE_MIN = "min"
REDUCE_MAX = "max"

_REDUCTIONS = (REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX)

Tensors = torch.Tensor | list[torch.Tensor]
Groups = list[list[int]] | None


def check_groups(name: str, groups: Groups) -> list[list[int]]:
    """The groups that were given, or one of all."""
    world = runtime.world_size()
    if not groups:
        return [list(range(world))]
    if sorted(itertools.chain.from_iterable(groups)) != list(range(world)):
        alone = "the job has one process, with ordinal 0" if world == 1 else "name each process once"
        expected = "[[0]] or None" if world == 1 else f"a partition of the ordinals 0 to {world - 1}, or None"
        raise ValueError(message(name, f"groups={groups}", expected=expected, do=alone))
    return groups


def own_group(groups: list[list[int]]) -> list[int]:
    """The group of this process."""
    ordinal = runtime.global_ordinal()
    return next(group for group in groups if ordinal in group)


def _check_reduction(name: str, kind: str) -> None:
    if kind not in _REDUCTIONS:
        raise ValueError(message(name, f"reduce_type={kind!r}", expected=listing(_REDUCTIONS)))


def _check_tensors(name: str, argument: str, value: Any) -> None:
    if isinstance(value, list | tuple) and all(isinstance(item, torch.Tensor) for item in value):
        return
    raise TypeError(
        message(name, f"`{argument}` needs to be a Tensor or a list of Tensors, but given {type(value).__name__}")
    )


def _deliver(
    name: str,
    value: Any,
    output: Any,
    convert: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    bucket_cap_mb: int = 0,
) -> Any:
    """Applies ``convert`` to buckets of a list, or to a tensor alone, into ``output`` where that is given."""
    if isinstance(value, torch.Tensor):
        (result,) = convert([value])
        return result if output is None else _fill(output, result)
    argument = "input" if name.startswith("reduce") else "value"
    _check_tensors(name, argument, value)
    results = (result for bucket in _buckets(value, bucket_cap_mb) for result in convert(bucket))
    if output is None:
        return [*results]
    if not isinstance(output, list) or not all(isinstance(item, torch.Tensor) for item in output):
        raise TypeError(message(name, f"`output` needs to be a list of Tensors, but given {type(output).__name__}"))
    if len(output) != len(value):
        raise ValueError(message(name, f"`output` length doesn't match `input` length: {len(output)} vs {len(value)}"))
    for target, result in zip(output, [*results], strict=True):
        _fill(target, result)
    return output


def _buckets(tensors: Sequence[torch.Tensor], cap_mb: int) -> Iterator[list[torch.Tensor]]:
    """A list in parts of one dtype and of so many MiB at most, or of one tensor."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (filled + size > cap_mb * 2**20 or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket


def _fill(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Puts a result into a tensor of any size, as for ``out=`` of PyTorch's functions."""
    return (target if target.shape == value.shape else target.resize_(value.shape)).copy_(value)


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
    chosen = check_groups("all_reduce", groups)
    single = isinstance(inputs, torch.Tensor)
    if not single:
        _check_tensors("all_reduce", "inputs", inputs)
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if runtime.world_size() == 1:
        results = [_scaled(t, scale) for t in tensors] if single or scale != 1.0 else []
    else:
        results = [_times(t, scale) for t in collectives.record("all_reduce", tensors, chosen, reduce_type)]
    if isinstance(inputs, torch.Tensor):
        return results[0]
    with torch.no_grad():
        for tensor, result in zip(inputs, results, strict=False):
            tensor.copy_(result)
    return inputs


def _times(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor if scale == 1.0 else (tensor * scale).to(tensor.dtype)


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
    return _all_gather(value, dim, groups, output)


def _all_gather(value: Tensors, dim: int, groups: Groups, output: Tensors | None, bucket_cap_mb: int = 0) -> Tensors:
    chosen = check_groups("all_gather", groups)

    def joined(tensor: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return gathered
        place = dim % tensor.dim()
        return gathered.movedim(0, place).flatten(place, place + 1)

    def gather(bucket: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in bucket:
            if not -max(tensor.dim(), 1) <= dim < max(tensor.dim(), 1):
                raise IndexError(
                    message("all_gather", f"dim={dim}", expected=f"a dimension of a {tensor.dim()}-dimensional tensor")
                )
        if runtime.world_size() == 1:
            return [tensor.clone() for tensor in bucket]
        if len(bucket) == 1:
            gathered = collectives.record("all_gather", bucket, chosen)
        else:
            (flat,) = collectives.record("all_gather", [torch.cat([t.reshape(-1) for t in bucket])], chosen)
            parts = flat.split([t.numel() for t in bucket], 1)
            gathered = [part.reshape(-1, *t.shape) for part, t in zip(parts, bucket, strict=True)]
        return [*map(joined, bucket, gathered)]

    return _deliver("all_gather", value, output, gather, bucket_cap_mb)


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
        raise RuntimeError(
            message(
                "all_gather_bucketized", "got pin_layout=True", expected="False", do="leave it out: XLA chooses layouts"
            )
        )
    _check_tensors("all_gather_bucketized", "input_list", input_list)
    return _all_gather(input_list, dim, groups, output, bucket_cap_mb)


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
    chosen = check_groups("all_to_all", groups)
    size = len(own_group(chosen))
    if split_count != size:
        raise ValueError(
            message("all_to_all", f"split_count={split_count}", expected=f"{size}, the number of processes")
        )
    if runtime.world_size() == 1:
        return value.clone()
    split, joined = split_dimension % value.dim(), concat_dimension % value.dim()
    parts = _parts("all_to_all", value, split, size)
    return collectives.record("all_to_all", [parts], chosen)[0].movedim(0, joined).flatten(joined, joined + 1)


def _parts(name: str, tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """A tensor as so many parts along a dimension, one after the other in a new first one."""
    if tensor.size(dim) % count:
        raise ValueError(
            message(name, f"shape {tuple(tensor.shape)}", expected=f"a size of dimension {dim} that {count} divides")
        )
    return tensor.unflatten(dim, (count, tensor.size(dim) // count)).movedim(dim, 0)


def collective_permute(value: torch.Tensor, pairs: list[list[int]]) -> torch.Tensor:
    """Sends tensors between processes.

    Args:
        value: The tensor to send.
        pairs: Pairs (source ordinal, target ordinal).

    Returns:
        What arrived here, or zeros if nothing did.
    """
    world = runtime.world_size()
    permutation = [(int(source), int(target)) for source, target in pairs]
    sources, targets = [source for source, _ in permutation], [target for _, target in permutation]
    fits = all(0 <= rank < world for rank in sources + targets)
    if not fits or len(set(sources)) < len(permutation) or len(set(targets)) < len(permutation):
        raise ValueError(
            message(
                "collective_permute",
                f"pairs={pairs}",
                expected="[[0, 0]] in a job of one process"
                if world == 1
                else f"ordinals 0 to {world - 1}, each at most once as a source and once as a target",
            )
        )
    if world == 1:
        return value.clone() if pairs else torch.zeros_like(value)
    return collectives.record("permute", [value], [range(world)], pairs=permutation)[0]


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
    world = runtime.world_size()
    if not 0 <= root_ordinal < world:
        raise ValueError(
            message(
                "collective_broadcast",
                f"root_ordinal={root_ordinal}",
                expected="0 in a job of one process" if world == 1 else f"0 to {world - 1}",
            )
        )
    if world == 1 or not tensors:
        return
    members = sorted(groups) if groups else list(range(world))
    if root_ordinal not in members:
        raise ValueError(message("collective_broadcast", f"root_ordinal={root_ordinal}", expected=f"one of {members}"))
    results = collectives.record("broadcast", tensors, [members], root=members.index(root_ordinal))
    with torch.no_grad():
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result)


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
    return _reduce_scatter(reduce_type, input, scale, scatter_dim, shard_count, groups, output)


def _reduce_scatter(
    reduce_type: str,
    input: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups,
    output: Tensors | None,
    bucket_cap_mb: int = 0,
) -> Tensors:
    _check_reduction("reduce_scatter", reduce_type)
    chosen = check_groups("reduce_scatter", groups)
    size = len(own_group(chosen))
    if shard_count != size:
        raise ValueError(
            message("reduce_scatter", f"shard_count={shard_count}", expected=f"{size}, the number of processes")
        )

    def scatter(bucket: list[torch.Tensor]) -> list[torch.Tensor]:
        if runtime.world_size() == 1:
            return [_scaled(tensor, scale) for tensor in bucket]
        stacks = [_parts("reduce_scatter", tensor, scatter_dim % tensor.dim(), size) for tensor in bucket]
        if len(stacks) == 1:
            results = collectives.record("reduce_scatter", stacks, chosen, reduce_type)
        else:
            flat = torch.cat([stack.reshape(size, -1) for stack in stacks], 1)
            (shard,) = collectives.record("reduce_scatter", [flat], chosen, reduce_type)
            shards = shard.split([stack.numel() // size for stack in stacks])
            results = [part.reshape(stack.shape[1:]) for part, stack in zip(shards, stacks, strict=True)]
        return [_times(result, scale) for result in results]

    return _deliver("reduce_scatter", input, output, scatter, bucket_cap_mb)


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
    return _reduce_scatter(reduce_type, input_list, scale, scatter_dim, shard_count, groups, output, bucket_cap_mb)


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
    for bucket in _buckets(gradients, bucket_cap_mb):
        all_reduce(REDUCE_SUM, bucket, scale=scale, groups=groups, pin_layout=pin_layout)


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of all parameters of an optimizer that have one."""
    return [
        param.grad.detach() for group in optimizer.param_groups for param in group["params"] if param.grad is not None
    ]


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True) -> None:
    """Averages the gradients of an optimizer over all processes, and over the devices of a `DataParallel` loop.

    Args:
        optimizer: The optimizer whose parameters are meant.
        groups: See `all_reduce`.
        pin_layout: See `all_reduce`.
    """
    chosen = check_groups("reduce_gradients", groups)
    count = len(own_group(chosen))
    _replicas.average(fetch_gradients(optimizer))
    if runtime.world_size() == 1:
        return  # the average over one process is what is there
    gradients = fetch_gradients(optimizer)
    bucket = _config.ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB.get()
    if bucket:
        all_reduce_bucketized_gradients(gradients, 1.0 / count, groups, pin_layout, bucket)
    else:
        all_reduce(REDUCE_SUM, gradients, scale=1.0 / count, groups=groups, pin_layout=pin_layout)
