"""Backend ``xla`` of `torch.distributed`; importing it registers the backend and ``init_method="xla://"``.

A group has one process in this version: what a collective gives is a copy of what it got.
"""

# mypy: disable-error-code="override,assignment"
# The C++ base class declares each collective twice, with options and with a timeout; Python calls the first form.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from torch_xla._errors import message
from torch_xla._internal import rendezvous
from torch_xla.core import xla_model as xm

Lists = Sequence[Sequence[torch.Tensor]]


def _done(result: Any) -> Any:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills a target that may have an extra dimension for the one process."""
    if target.numel() != source.numel():
        raise ValueError(
            message("process group", f"got shape {tuple(target.shape)}", expected=f"room for {tuple(source.shape)}")
        )
    target.copy_(source.reshape(target.shape))


class ProcessGroupXla(ProcessGroup):
    """A group of processes with XLA devices.

    Args:
        prefix_store: Store of the job.
        rank: Rank of this process.
        size: Number of processes.
        timeout: Accepted for compatibility.
    """

    def __init__(self, prefix_store: Any, rank: int, size: int, timeout: Any) -> None:
        if size != 1:
            raise NotImplementedError(
                message("process group", f"got world size {size}", expected="1 in this version", do="use backend gloo")
            )
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.prefix_store = prefix_store
        self.timeout = timeout
        self._name = ""

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "xla"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    def _only_this_process(self, rank: int) -> None:
        if rank != 0:
            raise ValueError(message("process group", f"got rank {rank}", expected="0, the only one"))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduces tensors in place."""
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduces tensors in place."""
        return _done(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduces tensors in place on one process."""
        self._only_this_process(opts.rootRank)
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Overwrites tensors with those of one process."""
        self._only_this_process(opts.rootRank)
        return _done(tensors)

    def _fill(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():
            for output, input in zip(outputs, inputs, strict=True):
                _copy(output, input)
        return _done(list(outputs))

    def allgather(self, output_tensors_list: Lists, input_tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Collects tensors of all processes."""
        return self._fill([outputs[0] for outputs in output_tensors_list], input_tensors)

    def allgather_coalesced(
        self, output_tensors_list: Lists, input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Collects tensors of all processes."""
        return self._fill(output_tensors_list[0], input_tensors)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Collects tensors of all processes."""
        return self._fill(outputs, inputs)

    def _allgather_base(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._fill([output_tensor], [input_tensor])

    def reduce_scatter(self, output_tensors: Sequence[torch.Tensor], input_tensors_list: Lists, opts: Any) -> Any:
        """Reduces, and keeps this process's part."""
        return self._fill(output_tensors, [inputs[0] for inputs in input_tensors_list])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Reduces, and keeps this process's part."""
        return self._fill(outputs, inputs)

    def _reduce_scatter_base(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any) -> Any:
        return self._fill([output_tensor], [input_tensor])

    def gather(self, output_tensors_list: Lists, input_tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Collects tensors on one process."""
        self._only_this_process(opts.rootRank)
        return self._fill([outputs[0] for outputs in output_tensors_list], input_tensors)

    def scatter(self, output_tensors: Sequence[torch.Tensor], input_tensors_list: Lists, opts: Any) -> Any:
        """Hands out the tensors of one process."""
        self._only_this_process(opts.rootRank)
        return self._fill(output_tensors, [inputs[0] for inputs in input_tensors_list])

    def alltoall(self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], o: Any) -> Any:
        """Sends part ``i`` to process ``i``."""
        return self._fill(output_tensors, input_tensors)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> Any:
        """Sends part ``i`` to process ``i``."""
        return self._fill([output], [input])

    # The names that torch 2.13 calls; earlier versions call those above.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """Waits for all processes, and issues a barrier."""
        xm.rendezvous("torch_xla.distributed.xla_backend.barrier")
        return _done([])

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes, and issues a barrier."""
        xm.rendezvous("torch_xla.distributed.xla_backend.barrier")

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> Any:
        """Sends to another process.

        Raises:
            ValueError: always: there is no other process.
        """
        raise ValueError(message("process group", f"send to rank {dst_rank}", expected="a second process"))

    def recv(self, out_tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> Any:
        """Receives from another process.

        Raises:
            ValueError: always: there is no other process.
        """
        raise ValueError(message("process group", f"receive from rank {src_rank}", expected="a second process"))

    def shutdown(self) -> None:
        """Has nothing to release."""

    def abort(self) -> None:
        """Has nothing to stop."""


def _create(store: Any, rank: int, size: int, timeout: Any) -> ProcessGroupXla:
    return ProcessGroupXla(store, rank, size, timeout)


if "xla" not in dist.Backend.backend_list:
    dist.Backend.register_backend("xla", _create, devices="xla")
    register_rendezvous_handler("xla", rendezvous.pjrt_rendezvous_handler)
