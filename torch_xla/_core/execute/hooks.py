"""Answers the recorder's calls of Python: transfers, barriers and reads, rules and checks of operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla import _bindings, _config, _fallbacks, _metrics
from torch_xla._core.device import client, failures, transfer
from torch_xla._core.device.buffers import kind
from torch_xla._core.execute import auto_barrier, barrier
from torch_xla._core.execute.untraced import untraced
from torch_xla._core.job import pending_collectives, same_program
from torch_xla.ops import checks, collective_call


class Hooks:
    """The methods that the recorder calls (`csrc/base/python_hooks.h`)."""

    fetch = staticmethod(barrier.fetch)
    cut_loop = staticmethod(barrier.cut_loop)
    query = staticmethod(untraced(barrier.query))

    @untraced
    def upload(self, tensor: torch.Tensor, index: int, number: int, immutable: bool) -> Any:
        """Brings a CPU tensor to a device; one that is `immutable` as it is need not be copied."""
        return transfer.upload(tensor, index, number, immutable)

    @untraced
    def fill(self, shape: Sequence[int], dtype: torch.dtype, *rest: Any) -> Any:
        """A buffer of a device that holds one number everywhere, as `transfer.fill` has it."""
        return transfer.fill(tuple(shape), dtype, *rest)

    def put(self, numbers: Any, index: int) -> Any:
        """Copies the numbers of a graph to a device."""
        _metrics.count("DeviceDataCacheMiss")
        return transfer.put(numbers, index)

    def explain(self, token: Any, index: int) -> None:
        """Raises what a run that failed has to say."""
        failures.finish(token, index)

    @untraced
    def copy(self, buffers: list[Any]) -> list[Any]:
        """Copies of device buffers, each on its device."""
        return transfer.copies(buffers)

    @untraced
    def pack(self, buffers: list[Any], stacked: bool) -> Any:
        """Several device buffers in one, end to end or as an array of them."""
        return kind().stack(buffers) if stacked else kind().pack(buffers)

    @untraced
    def member(self, stack: Any, index: int) -> Any:
        """One of an array's members as a buffer of its own."""
        return kind().member(stack, index)

    @untraced
    def unpack(self, buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
        """The parts of such a buffer, each as one of its own."""
        return kind().unpack(buffer, shapes)

    def evaluate(self, tensors: list[torch.Tensor]) -> None:
        """Computes tensors at once, in eager mode."""
        with _metrics.eager_operation():
            barrier.evaluate(tensors)

    @untraced
    def synchronize(self, index: int) -> None:
        """Computes all that was recorded on a device, and waits for it."""
        barrier.sync(index, wait=True)

    def note_read(self, op: str) -> None:
        """Counts an operator that gives a value to Python."""
        _metrics.count(op)

    def is_lowered(self, op: str) -> bool:
        """Whether an operator has a rule or a decomposition, and so takes every type that XLA has."""
        from torch_xla.ops.call import way_of

        return way_of(op) != "callback"

    @untraced
    def needs_host(self, op: str) -> bool:
        """Whether an operator runs on the host between two programs, because those of this device cannot call it."""
        if op == collective_call.NAME:
            from torch_xla._core.execute import host_collective

            return host_collective.is_used()
        # What is not asked imports no rules. Operators of this package are its own ways to say something to a program.
        return not (client.is_own_cpu() or op.startswith("xla.") or self.is_lowered(op) or client.has_callbacks())

    @untraced
    def check_call(self, op: str, recorded: str, arguments: tuple[Any, ...], result_bytes: int, ask: Any) -> float:
        """Raises where PyTorch refuses a call, as `checks.check_call` says."""
        return checks.check_call(op, recorded, arguments, result_bytes, ask)

    def note_host_op(self, op: str, reason: str) -> None:
        """Takes notice of an operator that runs on the host between two graphs."""
        _fallbacks.between_graphs(op, reason, _bindings.user_frame())


def install() -> None:
    """Connects the recorder; called once, at import."""
    _bindings.set_python_hooks(Hooks())
    if _config.XLA_USE_32BIT_LONG.get():
        _bindings.upload_eagerly()
    auto_barrier.initialize()
    pending_collectives.add_runner(barrier.sync)
    transfer.set_agreement(same_program.gather, same_program.settle)
