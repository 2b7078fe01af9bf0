"""Records collectives; `ops/collective.py` has what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from torch_xla import _bindings
from torch_xla._core.graph.library import XLA_LIB
from torch_xla._core.job import pending_collectives, session
from torch_xla._errors import message


def install() -> None:
    """Registers the operator with PyTorch; called once, at import."""
    XLA_LIB.define("collective(Tensor[] inputs, str call) -> Tensor[]")
    XLA_LIB.impl("collective", _meta_kernel, "Meta")


def _meta_kernel(inputs: list[torch.Tensor], call: str) -> list[torch.Tensor]:
    from torch_xla.ops.collective_call import parse

    parsed, rank = parse(call), session.rank_info().rank
    shapes = [(parsed.shape_of_result(tuple(x.shape), rank), x.dtype) for x in inputs]
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in [*shapes, ((), torch.uint8)]]


def record(
    kind: str,
    tensors: Sequence[torch.Tensor],
    groups: Sequence[Sequence[int]],
    reduction: str = "",
    root: int = 0,
    pairs: Sequence[tuple[int, int]] = (),
) -> list[torch.Tensor]:
    """Records a collective, as `torch_xla.ops.collective_call.Call` has it; gives a new tensor for each of its inputs.

    Processes that are in no group do nothing. Raises JobError where the job cannot be joined, or has stopped.
    """
    if not tensors:
        return []
    for position, tensor in enumerate(tensors):
        if tensor.device.type != "xla":
            raise ValueError(
                message(kind, f"tensor {position} is on {tensor.device}", expected="device xla", do="move it there")
            )
    text = _call(kind, groups, reduction, root, pairs)
    with torch.no_grad():
        *results, mark = torch.ops.xla.collective([t.detach() for t in tensors], text)
    # Whatever is compiled runs whole, and what the host computes has run.
    if not torch.compiler.is_compiling() and _bindings.location_of(mark) is None:
        pending_collectives.add(mark)
    return results


def _call(
    kind: str,
    groups: Sequence[Sequence[int]],
    reduction: str,
    root: int,
    pairs: Sequence[tuple[int, int]],
) -> str:
    """The argument of the operator."""
    from torch_xla.ops.collective_call import Call

    connection = session.connection()
    if connection is not None:
        connection.check()
    return Call(kind, partition(groups), reduction, root, tuple(pairs)).text()


# What `torch.compiler.assume_constant_result` does; that one imports the compiler, which takes seconds.
_call._dynamo_marked_constant = True  # type: ignore[attr-defined]


def partition(groups: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of which each process is in one: who is in none of those given is alone."""
    replica_groups = [tuple(int(rank) for rank in group) for group in groups]
    named = set(itertools.chain.from_iterable(replica_groups))
    return (*replica_groups, *((rank,) for rank in range(session.rank_info().world) if rank not in named))
