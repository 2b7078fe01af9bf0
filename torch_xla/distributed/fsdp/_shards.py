"""Parameters split over processes: where a shard takes the place of parameters, they are gathered when they are read.

A module's ``_parameters`` answers for them, so whatever reads ``module.weight`` gathers it: the forward pass, a
checkpointed part that runs again in the backward pass, a hook. The gradient comes back reduced over the processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import torch_xla
from torch_xla import _bindings
from torch_xla._core.functions import collectives
from torch_xla._torch_internals import at_end_of_backward, backward_pass, saved_tensors_hooks

# In the names of shards in place of the dots, which names of parameters cannot have.
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


@dataclass(frozen=True)
class Layout:
    """The sharding of parameters."""

    groups: Sequence[Sequence[int]]  # ordinals that share parameters, of all processes
    rank: int  # place of this process in its group
    size: int  # of its group
    by_rows: bool  # whether the first dimension is split, and not the elements
    multiple: int  # the number of elements of a shard is a multiple of it, unless it is split by rows
    dtype: torch.dtype  # in which parameters are gathered
    reduce_dtype: torch.dtype | None  # in which gradients are reduced; that of the gradient by default

    def split(self, full: torch.Tensor) -> torch.Tensor:
        """The shard of this process, as torch_xla 2 splits."""
        if self.by_rows and full.dim() > 0:
            rows = -(-full.size(0) // self.size)
            padded = F.pad(full, [0, 0] * (full.dim() - 1) + [0, rows * self.size - full.size(0)])
            return padded.narrow(0, rows * self.rank, rows).clone()
        unit = -(-full.numel() // (self.size * self.multiple)) * self.multiple
        return F.pad(full.flatten(), [0, unit * self.size - full.numel()]).narrow(0, unit * self.rank, unit).clone()

    def join(self, gathered: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Undoes `split`: the tensor of its shards, which are stacked in a first dimension."""
        if self.by_rows and shape:
            return gathered.flatten(0, 1).narrow(0, 0, shape[0])
        return gathered.flatten().narrow(0, 0, shape.numel()).view(shape)


@dataclass(frozen=True)
class Piece:
    """A parameter as it was."""

    name: str  # its first one
    shape: torch.Size
    places: tuple[tuple[nn.Module, str], ...]  # modules that have it, with its name there


class Ending:
    """Ends a backward pass over all shards of a model; with `syncs` with a barrier."""

    def __init__(self, shards: list[Shard], syncs: bool) -> None:
        self._shards, self._syncs, self._task = shards, syncs, -1

    def arrange(self) -> None:
        """Called in a backward pass, however often."""
        task = backward_pass()
        if task not in (-1, self._task):
            self._task = task
            at_end_of_backward(self._end)

    def _end(self) -> None:
        for shard in self._shards:
            shard.reduce_rest()
        if self._syncs:
            torch_xla.sync()


class Shard:
    """This process's part of one parameter, or of several, `pieces` of one whole, one after the other if it is flat.

    Optimizers change `param`. A backward pass reduces gradients if it `reduces`, otherwise it adds them up here. A
    value that was gathered is kept for the next reader if it `keeps`; `after` is what has to be there before one is
    gathered, `ending` what is done after a backward pass.
    """

    def __init__(
        self, name: str, pieces: list[Piece], full: torch.Tensor, layout: Layout, device: torch.device, flat: bool
    ) -> None:
        self.name, self.pieces, self.shape, self.flat = name, pieces, full.shape, flat
        self.layout = layout
        self.param = nn.Parameter(layout.split(full.detach()).to(device), requires_grad=full.requires_grad)
        self.reduces = True
        self.keeps = False
        self.after: torch.Tensor | None = None
        self.ending: Ending | None = None
        self._added: torch.Tensor | None = None
        self._full_value: torch.Tensor | None = None

    @property
    def registered_name(self) -> str:
        """Name of the part among the wrapper's parameters."""
        return f"_fsdp_shard.{self.name}".replace(".", SEPARATOR)

    def gather(self) -> torch.Tensor:
        """The shards of all processes, without a gradient."""
        local_shard = self.param.detach()
        if local_shard.is_floating_point():
            local_shard = local_shard.to(self.layout.dtype)
        if self.after is not None:
            # Not before what the wrapped module is called with is there: XLA would gather all modules at the start.
            local_shard, _ = torch.ops.xla.optimization_barrier([local_shard, self.after])
        return collectives.record("all_gather", [local_shard], self.layout.groups)[0]

    def full_tensor(self) -> torch.Tensor:
        """The value, gathered unless it is here."""
        if self._full_value is not None:
            return self._full_value
        joined = self.layout.join(_Gather.apply(self.param, self), self.shape)
        if self.keeps or backward_pass() != -1:
            self._full_value = joined
        return joined

    def piece(self, number: int) -> torch.Tensor:
        """A parameter."""
        if not self.flat:
            return self.full_tensor()
        sizes = [piece.shape.numel() for piece in self.pieces]
        return self.full_tensor().narrow(0, sum(sizes[:number]), sizes[number]).view(self.pieces[number].shape)

    def drop(self) -> None:
        """Forgets the value, which its readers may still have."""
        self._full_value = None

    def again(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """A function that recomputes a tensor that is part of the value; None for other tensors."""
        full_value = self._full_value
        if (
            full_value is None
            or tensor.dtype != full_value.dtype
            or _bindings.tensor_id(tensor) != _bindings.tensor_id(full_value)
        ):
            return None
        geometry = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        same = geometry == (tuple(full_value.shape), full_value.stride(), full_value.storage_offset())

        def make() -> torch.Tensor:
            with torch.no_grad():
                gathered = self.layout.join(self.gather(), self.shape)
                return gathered if same else gathered.as_strided(*geometry)

        return make

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The average over the processes of this process's part of a gradient, with what was added up before.

        None then.
        """
        self.drop()
        if self._added is not None:
            gradient = self._added + gradient
            self._added = None
        if not self.reduces:
            self._added = gradient
            return None
        if self.ending is not None:
            self.ending.arrange()
        param_dtype = self.param.dtype
        value = (gradient.to(self.layout.reduce_dtype or gradient.dtype) / self.layout.size).contiguous()
        return collectives.record("reduce_scatter", [value], self.layout.groups, "sum")[0].to(param_dtype)

    def reduce_rest(self) -> None:
        """Adds to the gradient what was added up and not in the backward pass that is over."""
        if self._added is None or not self.reduces:
            return
        gradient = self.reduce(torch.zeros_like(self._added))
        if gradient is not None:
            self.param.grad = gradient if self.param.grad is None else self.param.grad + gradient


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, shard: Shard) -> torch.Tensor:
        ctx.shard = shard
        return shard.gather()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.shard.reduce(gradients[0]), None


class _Parameters(dict[str, Any]):
    """Parameters of a module, of which some are shards elsewhere: found by name, and not listed."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(state)
        self.split: dict[str, tuple[Shard, int]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.split or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        entry = self.split.get(name)
        return entry[0].piece(entry[1]) if entry is not None else super().__getitem__(name)


# Parameters that were split, as modules outside of the wrapped one may still have them: their shard, and place in it.
_split = WeakIdKeyDictionary()


def _take_over(shard: Shard, params: Iterable[nn.Parameter]) -> None:
    """Puts a shard in the place of its parameters."""
    for number, (piece, param) in enumerate(zip(shard.pieces, params, strict=True)):
        _split[param] = (shard, number)
        for owner, name in piece.places:
            _read_from(shard, number, owner, name)


def _read_from(shard: Shard, number: int, owner: nn.Module, name: str) -> None:
    if not isinstance(owner._parameters, _Parameters):
        owner._parameters = _Parameters(owner._parameters)
    owner._parameters.pop(name)
    owner._parameters.split[name] = (shard, number)


def parameters_of(owners: Iterable[tuple[str, nn.Module]]) -> list[tuple[nn.Parameter, Piece]]:
    """The parameters of modules by name, without those inside, each once.

    Those that a module inside shares, and that were split with it, are from then on read from its shard.
    """
    occurrences: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, owner in owners:
        for name, param in list(owner._parameters.items()):
            if param is None:
                continue
            if param in _split:
                shard, number = _split[param]
                _read_from(shard, number, owner, name)
            else:
                occurrences.setdefault(param, []).append((f"{prefix}.{name}", owner, name))
    return [
        (param, Piece(places[0][0], param.shape, tuple((owner, name) for _, owner, name in places)))
        for param, places in occurrences.items()
    ]


def make_shards(
    pieces_of_params: list[tuple[nn.Parameter, Piece]], layout: Layout, device: torch.device, flat_name: str | None
) -> list[Shard]:
    """Splits parameters, which are then gathered where they are read.

    The flat name is that of the flat tensors that hold them; None for each by itself.
    """
    shards = []
    if flat_name is None:
        for param, piece in pieces_of_params:
            shards.append(Shard(piece.name, [piece], param, layout, device, False))
            _take_over(shards[-1], [param])
    else:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[nn.Parameter, Piece]]] = {}
        for param, piece in pieces_of_params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param, piece))
        for number, ((_, trains), members) in enumerate(kinds.items()):
            flat_param = torch.cat([param.detach().flatten() for param, _ in members]).requires_grad_(trains)
            pieces = [piece for _, piece in members]
            shards.append(Shard(f"{flat_name}{number}", pieces, flat_param, layout, device, True))
            _take_over(shards[-1], [param for param, _ in members])
    return shards


@contextmanager
def in_use(shards: list[Shard], args: Any, drops: bool) -> Iterator[None]:
    """A scope in which each value is gathered once, and with `drops` again in the backward pass.

    `args` are what the module is called with: a tensor in it is what gathering waits for.
    """
    for shard in shards:
        shard.drop()
        shard.keeps, shard.after = True, args
        _refresh_copies(shard)
    # A checkpoint around this scope keeps nothing of what is inside it anyway.
    outside = saved_tensors_hooks(False) is not None
    hooks = _gathered_again(shards) if drops and torch.is_grad_enabled() and not outside else None
    try:
        if hooks is None:
            yield
        else:
            with hooks:
                yield
    finally:
        for shard in shards:
            shard.keeps, shard.after = False, None
            if drops or not torch.is_grad_enabled():
                shard.drop()


def _refresh_copies(shard: Shard) -> None:
    """Recurrent layers keep their parameters in a list as well."""
    for piece in shard.pieces:
        for owner, _ in piece.places:
            if isinstance(owner, nn.RNNBase):
                owner._flat_weights = [getattr(owner, name) for name in owner._flat_weights_names]


def _gathered_again(shards: list[Shard]) -> Any:
    def pack(tensor: torch.Tensor) -> Any:
        if tensor.device.type == "xla":
            for shard in shards:
                make = shard.again(tensor)
                if make is not None:
                    return make
        return tensor

    def unpack(packed: Any) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else packed()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def total_norm(gradients: list[torch.Tensor], norm_type: float, reduce: Callable[[str, torch.Tensor], Any]) -> Any:
    """The norm of gradients of which each process has a part.

    `reduce` is over processes, with ``"sum"`` or ``"max"``.
    """
    local_norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if math.isinf(norm_type):
        return reduce("max", local_norm)
    return reduce("sum", local_norm**norm_type) ** (1.0 / norm_type)
