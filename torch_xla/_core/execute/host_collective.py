"""Runs collectives between two programs, by PyTorch's groups, on devices whose programs do not span the job."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import torch

from torch_xla import _bindings
from torch_xla._core.compile import interruptible
from torch_xla._core.device import client, failures
from torch_xla._core.graph import sequence
from torch_xla._core.graph.library import XLA_LIB
from torch_xla._core.job.session import rank_info, session
from torch_xla._errors import JobError, message
from torch_xla.ops import collective, collective_call
from torch_xla.ops.fallback import from_numpy, to_numpy


@functools.cache
def is_used() -> bool:
    """Whether collectives run so here: a plugin's client that was told of the job's processes knows its own only."""
    if rank_info().world == 1 or client.is_own_cpu() or client.spans_job():
        return False
    # Not where programs have collectives in them: PyTorch's kernels may compute what has a kernel.
    XLA_LIB.impl("collective", _compute, "CPU")
    return True


def _compute(inputs: list[torch.Tensor], text: str) -> list[torch.Tensor]:
    connection = session()
    assert connection is not None
    connection.check()
    call, rank = collective_call.parse(text), connection.rank_info.rank
    group = call.group_of(rank)
    if len(group) > 1:
        connection.group(group)
    number = sequence.numbered(sequence.described(call, inputs), f"run at {_bindings.user_frame()}")
    arrays = [to_numpy(tensor) for tensor in inputs]

    def run() -> list[np.ndarray]:
        with client.x64(), jax.default_device(_host()):
            return [np.asarray(array) for array in _program(call, rank, number)(*arrays)]

    try:
        *results, mark = interruptible.call(run, str(call))
    except Exception as error:
        reason = failures.explained(error)
        if reason is None:
            raise
        raise JobError(reason) from None
    except BaseException:  # the thread that is in it must not be waited for
        connection.break_off(f"[job] rank {rank} was interrupted in {sequence.meaning(number)[0]}")
        raise
    dtypes = [*(x.dtype for x in inputs), torch.uint8]
    return [from_numpy(array, dtype) for array, dtype in zip((*results, mark), dtypes, strict=True)]


@functools.lru_cache(maxsize=1024)
def _program(call: collective_call.Call, rank: int, number: int) -> Any:
    def program(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return collective.compute_by_host(call, arrays, rank, collective.Order({call.group_of(rank): [number]}))

    return jax.jit(program)


def _host() -> jax.Device:
    """JAX's own CPU client, which can call PyTorch's groups; RuntimeError where there is none, or no support for it."""
    try:
        if collective.register():
            return jax.local_devices(backend="cpu")[0]
        lacking = "built without jaxlib's headers"
    except RuntimeError as error:
        lacking = str(error)
    problem = f"programs of {client.device_type()} do not span the processes of a job, and the host has no collectives"
    raise RuntimeError(message("job", f"{problem} ({lacking})", do="start one process, or let JAX have its CPU client"))
