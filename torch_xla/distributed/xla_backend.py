"""Backend ``xla`` of `torch.distributed`; importing it registers the backend and ``init_method="xla://"``.

Collectives of tensors on device ``xla`` are recorded, and run with the graph that they are part of; those of CPU
tensors run at once, on an inner process group.
"""

# mypy: disable-error-code="override,assignment"
# The C++ base class declares each collective twice, with options and with a timeout; Python calls the first form.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import register_rendezvous_handler

from torch_xla import _api, _config, runtime
from torch_xla._core.execute.untraced import untraced
from torch_xla._core.functions import collectives
from torch_xla._core.job import pending_collectives, session, tries
from torch_xla._core.job.store import host_group
from torch_xla._core.torch import default_accelerator
from torch_xla._errors import message
from torch_xla._internal import rendezvous
from torch_xla._torch_internals import Reducer, _rendezvous_handlers
from torch_xla.distributed import _default_device, _device_mesh, _fsdp_ops
from torch_xla.distributed._host_work import Done, HostWork

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]

# Whether DistributedDataParallel asks in C++, for the order of its buckets: the host's numbers, read at once.
_orders_buckets = ContextVar("orders_buckets", default=False)
_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.PRODUCT: "mul",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
    dist.ReduceOp.PREMUL_SUM: "sum",
}


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills a target that may have an extra dimension for the processes."""
    if target.numel() != source.numel():
        raise ValueError(
            message("process group", f"got shape {tuple(target.shape)}", expected=f"room for {tuple(source.shape)}")
        )
    with torch.no_grad():
        target.copy_(source.reshape(target.shape))


def _are_on_host(tensors: Tensors) -> bool:
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _kind(op: Any) -> str:
    reduction = next((kind for reduce_op, kind in _REDUCTIONS.items() if op == reduce_op), None)
    if reduction is None:
        raise ValueError(message("process group", f"got reduction {op}", expected="one of torch.distributed.ReduceOp"))
    return reduction


def _factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM."""
    return op.__getstate__()[1]


class ProcessGroupXla(ProcessGroup):
    """A group of processes with XLA devices: the first of the job, unless `enter` says which.

    Args:
        prefix_store: Store of the group.
        rank: Place of this process in it.
        size: Number of its processes.
        timeout: How long a collective of CPU tensors may take.
    """

    def __init__(self, prefix_store: Any, rank: int, size: int, timeout: timedelta | None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = prefix_store
        self.timeout = timeout
        self._name = ""
        self._ranks: list[int] | None = None
        self._inner: Any = None
        self._count = 0  # collectives on the host

    def enter(self, ranks: Sequence[int]) -> None:
        """Makes the group one of these ranks of the job, in their order, and waits until all are here.

        Raises:
            RuntimeError: The job has fewer processes.
        """
        world = session.rank_info().world
        if max(ranks, default=0) >= world:
            raise RuntimeError(
                message(
                    "process group",
                    f"got ranks {list(ranks)} in a job of {world} processes",
                    do="start the processes with torch_xla.launch or torchrun, so that each knows of the others",
                )
            )
        self._ranks = list(ranks)
        if (connection := session.connection()) is not None:
            # All are here now, which a message between two of them does not say; and PyTorch has them wait after this.
            connection.meet("process group", session.as_ranks(ranks), "the start of a process group")
            self._host()

    @property
    def _members(self) -> list[int]:
        if self._ranks is None:
            self.enter(range(self.size()))
        assert self._ranks is not None
        return self._ranks

    def getBackendName(self) -> str:
        """Name of the backend."""
        return "xla"

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes; PyTorch has only those of backends registered with a group of its own."""
        return [torch.device("xla"), torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroupXla:
        """The backend for tensors of a device: the group itself, which is no backend of PyTorch's own."""
        if device.type not in ("xla", "cpu"):
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether memory of its own is to be taken for what it sends."""
        return False

    # What PyTorch asks of groups of the process's accelerator.

    supports_splitting = True
    options = None

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device of the process, where it is the accelerator; PyTorch sets it for groups that it makes itself."""
        return _api.device() if default_accelerator.on() else None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device) -> None:
        pass

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: a group waits for its members when it is made."""

    perform_nocolor_split = eager_connect_single_device

    def _set_sequence_number_for_group(self) -> None:
        pass

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroupXla | None:
        """The group of some of its processes, which come to it together; None in the others."""
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self._store)  # type: ignore[attr-defined]
        subgroup = ProcessGroupXla(store, ranks.index(self.rank()), len(ranks), timeout or self.timeout)
        subgroup._set_group_name(group_name)
        subgroup.enter([self._members[rank] for rank in ranks])
        return subgroup

    def get_group_store(self) -> Any:
        """The store of the group."""
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    def _host(self) -> Any:
        """The group that works on CPU tensors."""
        pending_collectives.run()
        if self._inner is None:
            self._inner = host_group(self._store, self.rank(), self.size(), self.timeout)
        return self._inner

    def _on_host(self, name: str, *arguments: Any) -> HostWork:
        """Starts what the group on the host does itself."""
        self._count += 1
        host = self._host()
        return HostWork(lambda: getattr(host, name)(*arguments), name, self._members, (self._name, self._count))

    def _record(self, kind: str, tensors: Tensors, **how: Any) -> list[torch.Tensor]:
        if self.size() == 1 and session.rank_info().world == 1:
            copies = [t.detach().clone() for t in tensors]
            if kind == "all_gather":
                return [t[None] for t in copies]
            return [t[0] for t in copies] if kind == "reduce_scatter" else copies
        return collectives.record(kind, tensors, [self._members], **how)

    def _reduced(self, kind: str, tensors: Tensors, op: Any) -> list[torch.Tensor]:
        if op == dist.ReduceOp.PREMUL_SUM:
            factor = _factor(op)
            tensors = [t * factor for t in tensors]
        results = self._record(kind, tensors, reduction=_kind(op))
        if op == dist.ReduceOp.AVG:
            return [(r / self.size()).to(r.dtype) for r in results]
        return results

    def _fill(self, outputs: Tensors, results: Tensors) -> Any:
        for output, result in zip(outputs, results, strict=True):
            _copy(output, result)
        return Done(list(outputs))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduces tensors in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if _are_on_host(tensors):
            return self._reduce_on_host(tensors, op)
        return self._fill(tensors, self._reduced("all_reduce", tensors, op))

    def _reduce_on_host(self, tensors: Tensors, op: Any) -> HostWork:
        """With what PyTorch's group for the host lacks: averages, sums of multiples, and lists."""
        plain = dist.AllreduceOptions()
        average, scaled = op == dist.ReduceOp.AVG, op == dist.ReduceOp.PREMUL_SUM
        plain.reduceOp = dist.ReduceOp.SUM if average or scaled else op
        for tensor in tensors if scaled else ():
            tensor.mul_(_factor(op))
        works = [self._on_host("allreduce", [tensor], plain) for tensor in tensors]

        def finish() -> None:
            for work in works[:-1]:
                work.wait()
            for tensor in tensors if average else ():
                tensor.copy_(tensor / self.size())

        return works[-1].then(finish, list(tensors))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduces tensors in place."""
        return self.allreduce(tensors, opts) if tensors else Done(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduces tensors in place on one process."""
        self._check_place(opts.rootRank)
        mine = self.rank() == opts.rootRank
        if _are_on_host(tensors):
            buffers = list(tensors) if mine else [t.clone() for t in tensors]  # only the root's may change
            return self._reduce_on_host(buffers, opts.reduceOp)
        results = self._reduced("all_reduce", tensors, opts.reduceOp)
        return self._fill(tensors, results) if mine else Done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Overwrites tensors with those of one process."""
        self._check_place(opts.rootRank)
        if _are_on_host(tensors):
            return self._on_host("broadcast", tensors, opts)
        if self.size() > 1 and _orders_buckets.get():
            host = [t.cpu() for t in tensors]
            self._on_host("broadcast", host, opts).wait()
            return self._fill(tensors, [t.to("xla") for t in host])
        return self._fill(tensors, self._record("broadcast", tensors, root=opts.rootRank))

    def _check_place(self, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(
                message("process group", f"got rank {rank}", expected="0, the only one")
                if self.size() == 1
                else message("process group", f"got rank {rank}", expected=f"0 to {self.size() - 1}")
            )

    def allgather(self, output_tensors_list: Lists, input_tensors: Tensors, opts: Any = None) -> Any:
        """Collects tensors of all processes, whose shapes may differ."""
        for outputs, tensor in zip(output_tensors_list, input_tensors, strict=True):
            self._fill(outputs, self._gathered(tensor, [tuple(o.shape) for o in outputs]))
        return Done([list(outputs) for outputs in output_tensors_list])

    def _gathered(self, tensor: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if len(set(sizes)) <= 1:
            return list(self._rows(tensor).unbind(0))
        flat = torch.nn.functional.pad(tensor.reshape(-1), (0, max(sizes) - tensor.numel()))
        return [row[:size].view(shape) for row, size, shape in zip(self._rows(flat), sizes, shapes, strict=True)]

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes, one after the other in a new first dimension."""
        if not _are_on_host([tensor]):
            return self._record("all_gather", [tensor])[0]
        gathered = tensor.new_empty((self.size(), *tensor.shape))
        self._on_host("_allgather_base", gathered.view(-1), tensor.reshape(-1)).wait()
        return gathered

    def allgather_coalesced(self, output_tensors_list: Lists, input_tensors: Tensors, opts: Any = None) -> Any:
        """Collects tensors of all processes."""
        for place, tensor in enumerate(input_tensors):
            self.allgather([[outputs[place] for outputs in output_tensors_list]], [tensor])
        return Done([list(outputs) for outputs in output_tensors_list])

    def _allgather_base(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._fill([output_tensor], [self._rows(input_tensor)])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Collects tensors of all processes."""
        return self._fill(outputs, [self._rows(tensor) for tensor in inputs])

    def reduce_scatter(self, output_tensors: Tensors, input_tensors_list: Lists, opts: Any = None) -> Any:
        """Reduces, and keeps this process's part."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for output, parts in zip(output_tensors, input_tensors_list, strict=True):
            if len({part.numel() for part in parts}) > 1:
                flat = torch.cat([part.reshape(-1) for part in parts])
                options = dist.AllreduceOptions()
                options.reduceOp = op
                self.allreduce([flat], options).wait()
                _copy(output, flat.split([part.numel() for part in parts])[self.rank()])
            else:
                self._scatter_sum(output, torch.stack([part.reshape(output.shape) for part in parts]), op)
        return Done(list(output_tensors))

    def _scatter_sum(self, output: torch.Tensor, parts: torch.Tensor, op: Any) -> None:
        """Reduces parts, one per process in the first dimension."""
        if _are_on_host([parts]):
            self._reduce_on_host([parts], op).wait()
            _copy(output, parts[self.rank()])
        else:
            _copy(output, self._reduced("reduce_scatter", [parts], op)[0])

    def _reduce_scatter_base(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if input_tensor.numel() != output_tensor.numel() * self.size():
            raise ValueError(
                message(
                    "process group",
                    f"got an input of shape {tuple(input_tensor.shape)}",
                    expected=f"{self.size()} times the {output_tensor.numel()} values of the output",
                )
            )
        parts = input_tensor.reshape(self.size(), *output_tensor.shape)
        self._scatter_sum(output_tensor, parts.clone() if _are_on_host([parts]) else parts, op)
        return Done([output_tensor])

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Reduces, and keeps this process's part."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return Done(list(outputs))

    def gather(self, output_tensors_list: Lists, input_tensors: Tensors, opts: Any) -> Any:
        """Collects tensors on one process."""
        self._check_place(opts.rootRank)
        if _are_on_host(input_tensors):
            return self._on_host("gather", list(map(list, output_tensors_list)), list(input_tensors), opts)
        for place, tensor in enumerate(input_tensors):
            gathered = self._record("all_gather", [tensor])[0]
            if self.rank() == opts.rootRank:
                self._fill(output_tensors_list[place], list(gathered.unbind(0)))
        return Done([list(outputs) for outputs in output_tensors_list])

    def gather_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, opts: Any) -> Any:
        """Collects tensors on one process, in one."""
        self._check_place(opts.rootRank)
        gathered = self._rows(input_tensor)
        return self._fill([output_tensor], [gathered]) if self.rank() == opts.rootRank else Done([])

    def scatter(self, output_tensors: Tensors, input_tensors_list: Lists, opts: Any) -> Any:
        """Hands out the tensors of one process."""
        self._check_place(opts.rootRank)
        if _are_on_host(output_tensors):
            return self._on_host("scatter", list(output_tensors), list(map(list, input_tensors_list)), opts)
        for place, output in enumerate(output_tensors):
            if self.rank() == opts.rootRank:
                parts = torch.stack([part.reshape(output.shape) for part in input_tensors_list[place]])
            else:
                parts = output.new_zeros((self.size(), *output.shape))
            _copy(output, self._record("broadcast", [parts], root=opts.rootRank)[0][self.rank()])
        return Done(list(output_tensors))

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Any:
        """Sends part ``i`` to process ``i``."""
        sizes = [t.numel() for t in input_tensors], [t.numel() for t in output_tensors]
        flat = torch.cat([t.reshape(-1) for t in input_tensors])
        received = flat.new_empty(sum(sizes[1]))
        input_sizes, output_sizes = ([], []) if len({*sizes[0], *sizes[1]}) == 1 else sizes
        self.alltoall_base(received, flat, output_sizes, input_sizes, opts).wait()
        return self._fill(output_tensors, list(received.split(sizes[1])))

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        """Sends part ``i`` to process ``i``."""
        if _are_on_host([input]):
            return self._on_host("alltoall_base", output, input, list(output_splits or []), list(input_splits or []))
        if not output_splits and not input_splits:
            parts = input.reshape(self.size(), -1)
            return self._fill([output], self._record("all_to_all", [parts]))
        return self._uneven_exchange(output, input, list(output_splits or []), list(input_splits or []))

    def _uneven_exchange(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Any:
        """All gather the longest part of all, padded; XLA's shapes are fixed, and only the sizes here are known."""
        widest = max(session.exchange_ints(max([*output_splits, *input_splits]), self._members, "all_to_all"))
        input_sizes = input_splits or [input.size(0) // self.size()] * self.size()
        output_sizes = output_splits or [output.size(0) // self.size()] * self.size()
        rest = input.shape[1:]
        parts = [torch.cat([part, part.new_zeros((widest - part.size(0), *rest))]) for part in input.split(input_sizes)]
        received = self._record("all_to_all", [torch.stack(parts)])[0]
        return self._fill([output], [torch.cat([row[:size] for row, size in zip(received, output_sizes, strict=True)])])

    # The names that torch 2.13 calls; earlier versions call those above.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Any:
        """Computes what is pending, and waits for all processes of the group."""
        _api.sync(wait=True)
        session.wait_for_all(self._members, "torch.distributed.barrier()")
        return Done([])

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Computes what is pending, and waits for all processes of the group."""
        self.barrier()

    # What two processes exchange goes over the host: their programs differ, and one that waits stops all after it.

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int = 0) -> Any:
        """Sends to another process."""
        self._check_partner(dst_rank)
        group, host = self._host(), [t.detach().cpu().contiguous() for t in tensors]
        work = HostWork(lambda: group.send(host, dst_rank, tag), "send", [self._members[dst_rank]])
        return work.then(None, host)

    def recv(self, out_tensors: list[torch.Tensor], src_rank: int, tag: int = 0) -> Any:
        """Receives from another process."""
        self._check_partner(src_rank)
        group, host = self._host(), [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in out_tensors]
        work = HostWork(lambda: group.recv(host, src_rank, tag), "recv", [self._members[src_rank]])
        return work.then(lambda: self._fill(out_tensors, host), out_tensors)

    def recv_anysource(self, out_tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Receives from whichever process sends first."""
        group, host = self._host(), [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in out_tensors]
        work = HostWork(lambda: group.recv_anysource(host, tag), "recv", [])
        return work.then(lambda: self._fill(out_tensors, host), out_tensors)

    recvAnysource = recv_anysource

    def _check_partner(self, rank: int) -> None:
        if self.size() == 1:
            raise ValueError(message("process group", "send or receive", expected="a second process"))
        self._check_place(rank)

    # Whoever asks for several at once gets them one after the other: they are one program anyway.

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Any:
        return Done([])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def shutdown(self) -> None:
        """Has nothing to release."""

    def abort(self) -> None:
        """Has nothing to stop."""


# PyTorch's C++ code calls them too, within a call that is being traced.
for _method in [name for name, member in vars(ProcessGroupXla).items() if isinstance(member, FunctionType)]:
    if not _method.startswith("_"):
        setattr(ProcessGroupXla, _method, untraced(getattr(ProcessGroupXla, _method)))


def _create(options: Any, backend_options: Any) -> ProcessGroupXla:
    if runtime.is_spmd():
        raise RuntimeError(
            message(
                "spmd",
                "got process group 'xla' in SPMD mode, where all processes are one device",
                do="use init_process_group('gloo') for what processes tell each other, and mark_sharding for tensors",
            )
        )
    timeout = options.timeout if isinstance(options.timeout, timedelta) else None
    group = ProcessGroupXla(options.store, options.group_rank, options.group_size, timeout)
    group.enter(list(options.global_ranks_in_group) or range(options.group_size))
    return group


def _of_this_try(find: Callable[..., Iterator[tuple[Any, int, int]]]) -> Callable[..., Iterator[tuple[Any, int, int]]]:
    """Makes a rendezvous handler give a part of the store, where that is of other tries of the job too."""

    @functools.wraps(find)
    def find_this_try(url: str, *args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world in find(url, *args, **options):
            yield tries.of_this_try(store, rank, world, "torch.distributed"), rank, world

    return find_this_try


_default_device.install()
_device_mesh.install()
_fsdp_ops.install()
Reducer._rebuild_buckets = _config.within(_orders_buckets, True)(Reducer._rebuild_buckets)
if "xla" not in dist.Backend.backend_list:
    _rendezvous_handlers.update({name: _of_this_try(_rendezvous_handlers[name]) for name in ("env", "tcp")})
    dist.Backend.register_backend("xla", _create, extended_api=True, devices=["xla", "cpu"])
    register_rendezvous_handler("xla", rendezvous.pjrt_rendezvous_handler)
