"""What one recorded call of a step read, wrote and returned: two calls that agree can be replayed (`step.py`)."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla import _bindings
from torch_xla._core.device import transfer
from torch_xla._core.replay.call import Call, CannotReplay
from torch_xla._core.replay.effects import HostArguments, Optimizers, host_randomness
from torch_xla._core.replay.guards import guards_of

# Where something comes from, or goes to: a kind, and what tells it from others of its kind.
Origin = tuple[Any, ...]
_ALIVE = 3  # references to an element of a list that a loop looks at


@dataclass
class Change:
    """A value that a storage has after the step.

    Attributes:
        storage: Its id.
        target: Where it is found: ``("storage", id)``, ``("argument", k)``, ``("gradient", j)`` of those that existed,
            else ``("made gradient", j)``, ``("result",)`` or ``("kept",)``.
        output: The output of the graph that is the value, or -1.
        source: Else where that was before the step.
        line: The user's line that made it.
    """

    storage: int
    target: Origin
    output: int
    source: Origin | None
    copied: int  # the storage it was copied from, or 0
    line: str | None


@dataclass
class Facts:
    """All that a replay has to repeat, and what it relies on."""

    recording: _bindings.Recording
    device: int
    key: str
    executable: Any
    guards: _bindings.Guards
    lines: list[str | None]  # of the leaves
    reads: list[Origin] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # host values, by leaf
    numbers: list[Any] = field(default_factory=list)
    seeds: dict[int, tuple[str, int]] = field(default_factory=dict)  # by number: "seed", or "offset" and how far
    drawn: int = 0
    fixed: dict[int, int] = field(default_factory=dict)  # storages of arguments that are more than arguments
    had_gradient: list[bool] = field(default_factory=list)
    gradients_then: list[str] = field(default_factory=list)  # "keep", "clear" or "make"
    results: list[Origin] = field(default_factory=list)
    result_spec: Any = None
    likes: list[torch.Tensor | None] = field(default_factory=list)  # per result
    written: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    complete: bool = True  # whether it knew all parameters from the start

    def forget_values(self) -> None:
        """Lets go of the tensors of the call."""
        self.likes.clear()
        self.constants.clear()

    def structure(self) -> tuple[Any, ...]:
        """What two calls that can be replayed have in common, beside random numbers' seeds."""
        return (
            self.key,
            self.reads,
            [(c.target, c.output, c.source) for c in self.changes],
            sorted(self.seeds.items()),
            self.drawn,
            [value for place, value in enumerate(self.numbers) if place not in self.seeds],
            self.fixed,
            self.had_gradient,
            self.gradients_then,
            self.results,
            str(self.result_spec),
        )


class Parameters:
    """Tensors with gradients that a step has to do with, in the order in which they were seen."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[torch.Tensor]] = []
        self._known: set[int] = set()

    def add(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether some of them are new."""
        count = len(self.references)
        for tensor in tensors:
            if id(tensor) not in self._known:
                self._known.add(id(tensor))
                self.references.append(weakref.ref(tensor))
        return len(self.references) > count

    def tensors(self) -> list[torch.Tensor | None]:
        return [reference() for reference in self.references]

    def gradients(self) -> list[int]:
        """The storages of their gradients; 0 where there is none."""
        return [_id_of(p.grad) if p is not None and p.grad is not None else 0 for p in self.tensors()]


def _id_of(tensor: torch.Tensor) -> int:
    return _bindings.tensor_id(tensor) if tensor.device.type == "xla" else 0


class Recorder:
    """Records one call of a step.

    Args:
        call: Its arguments.
        parameters: Those that earlier calls have to do with.
        latest: What the latest call did that became a graph, by its key.
        guards: What the function sees before the call.
    """

    def __init__(
        self,
        call: Call,
        parameters: Parameters,
        latest: dict[str, Facts],
        guards: _bindings.Guards,
    ) -> None:
        self._call = call
        self._parameters = parameters
        self._latest = latest
        self._guards = guards
        self._optimizers = Optimizers()
        self.reads = False
        self._seen: list[Facts] = []
        self._result: list[Any] = []
        indices = (t.device.index for t in call.tensors if t.device.type == "xla")
        self.device: int = next(indices, _bindings.current_device())

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls the step, with nothing pending before it."""
        self._gradients = self._parameters.gradients()
        self._arguments = [_id_of(t) for t in self._call.tensors]
        self._state = _bindings.rng_state(self.device)
        self._random = host_randomness()
        self._recording = _bindings.Recording(self.device)
        on_host = [t for t in self._call.tensors if t.device.type != "xla"]
        self._host = HostArguments(on_host, self._recording)
        try:
            with self._optimizers.watched(), self._host if on_host else nullcontext():
                leaves, self._spec = pytree.tree_flatten(function(*args, **kwargs))
            self._result = leaves
        finally:
            self._recording.stop()

    def result(self) -> Any:
        """What the step returned."""
        copies = {id(self._call.tensors[i]): given for i, given in self._call.own.items()}
        return pytree.tree_unflatten([copies.get(id(x), x) for x in self._result], self._spec)

    def see(self, cut: _bindings.Graph | None, executable: Any) -> None:
        """Takes notice of the graph that the step became, about to run; None where a value is read before."""
        if cut is None:
            self.reads = True
            return
        self._recording.see(cut)
        facts = Facts(self._recording, cut.device, cut.key, executable, self._guards, cut.leaf_frames)
        for i, storage in enumerate(self._recording.reads):
            if storage == 0:
                shape, dtype = cut.leaf_metas[i]
                facts.constants[i] = transfer.download(cut.leaf_locations()[i], shape, dtype)
        self._seen.append(facts)

    def graphs(self) -> list[str]:
        """The keys of its graphs."""
        return [facts.key for facts in self._seen]

    def facts(self, function: Callable[..., Any], name: str) -> Facts:
        """What was noted.

        Args:
            function: The step.
            name: What it is called.

        Raises:
            CannotReplay: The step cannot be replayed.
        """
        if len(self._seen) != 1 or self._seen[0].device != self.device:
            raise CannotReplay(f"it became {len(self._seen)} graphs")
        facts = self._seen[0]
        if self._recording.relaid:
            raise CannotReplay("it gives a tensor's storage another size")
        if host_randomness() != self._random:
            raise CannotReplay("it draws random numbers on the host; draw them outside and pass them, or on the device")
        if self._host.computed is not None:
            raise CannotReplay(
                f"it computes on the host with an argument, in {self._host.computed}; copy it to the device first"
            )
        self._take_gradients(facts)
        self._take_changes(facts)
        self._take_reads(facts)
        self._take_numbers(facts)
        self._take_results(facts)
        self._take_guards(facts, function, name)
        self._check_found(facts)
        return facts

    def _take_guards(self, facts: Facts, function: Callable[..., Any], name: str) -> None:
        kept = {change.storage for change in facts.changes if change.target == ("kept",)}
        if self._guards.opaque:
            raise CannotReplay(
                f"it depends on {self._guards.opaque[0]}, which cannot be compared; use it outside and pass tensors"
            )
        differs = self._guards.check(kept)
        if differs is not None:
            where, how = differs
            raise CannotReplay(f"it changes {where}, which {how}; keep that in a tensor, or outside", first=False)
        if kept:
            facts.guards = guards_of(function, name)
        known = {*self._guards.storages, *facts.guards.storages, *self._gradients}
        facts.fixed = {k: storage for k, storage in enumerate(self._arguments) if storage and storage in known}

    def _check_found(self, facts: Facts) -> None:
        """Refuses tensors that no replay could find: nothing says that the next call has the same."""
        before, after = self._guards.storages, facts.guards.storages
        for origin, line in zip(facts.reads, facts.lines, strict=True):
            if origin[0] == "storage" and origin[1] not in before:
                raise CannotReplay(
                    f"it reads a tensor, made at {line}, that its code does not name; pass it as an argument"
                )
        for change in facts.changes:
            if change.target[0] in ("storage", "kept") and change.storage not in after:
                raise CannotReplay(
                    f"it keeps a tensor where its code names nothing, made at {change.line}; return it instead"
                )

    def _take_gradients(self, facts: Facts) -> None:
        touched = self._recording.touched
        leaves = [t for t, _ in touched if t.requires_grad and t.is_leaf]
        facts.written = [weakref.ref(t) for t, written in touched if written]
        if self._parameters.add([*leaves, *self._of_optimizers()]):
            facts.complete = False
        self._after = self._parameters.gradients()
        before = self._gradients + [0] * (len(self._after) - len(self._gradients))
        made = {change[0] for change in self._recording.changes if not change[1]}
        for old, new in zip(before, self._after, strict=True):
            if new == old:
                facts.gradients_then.append("keep")
            elif new == 0:
                facts.gradients_then.append("clear")
            elif new in made:
                facts.gradients_then.append("keep" if old else "make")
            else:
                raise CannotReplay("it gives a parameter another tensor's gradient")
        facts.had_gradient = [bool(old) for old in before]
        self._gradients = before

    def _of_optimizers(self) -> list[torch.Tensor]:
        return [
            p
            for optimizer in self._optimizers.found.values()
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def _take_changes(self, facts: Facts) -> None:
        results: dict[int, int] = {}
        for x in self._result:
            if isinstance(x, torch.Tensor) and x.device.type == "xla":
                results[_id_of(x)] = results.get(_id_of(x), 0) + 1
        after = {storage: j for j, storage in enumerate(self._after) if storage}
        for storage, existed, output, source, line in self._recording.changes:
            if not self._recording.lives(storage):
                continue  # what kept it was over with the barrier
            if existed:
                target = self._origin(storage, facts)
            elif storage in after:
                target = ("gradient" if facts.had_gradient[after[storage]] else "made gradient", after[storage])
            elif storage in results:
                target = ("result",)
            else:
                target = ("kept",)
            if output < 0 and source == 0:
                if target == ("kept",):
                    continue  # a batch that a loader's thread copied meanwhile, or a constant
                raise CannotReplay(f"a tensor that it keeps or returns, made at {line}, comes from the host")
            where = self._origin(source, facts) if output < 0 else None
            facts.changes.append(Change(storage, target, output, where, source, line))

    def _origin(self, storage: int, facts: Facts) -> Origin:
        """Where a storage that existed before the step is found."""
        if storage in self._arguments:
            return "argument", self._arguments.index(storage)
        if storage in self._gradients:
            return "gradient", self._gradients.index(storage)
        earlier = self._latest.get(facts.key)
        if earlier is not None and storage in self._recording.gone:
            for change in earlier.changes:
                if change.storage == storage and change.target[0] == "kept":
                    return "carried", change.output
        return "storage", storage

    def _take_reads(self, facts: Facts) -> None:
        for i, (storage, upload) in enumerate(zip(self._recording.reads, self._recording.copied, strict=True)):
            if storage:
                facts.reads.append(self._origin(storage, facts))
                continue
            source, shape, dtype = self._recording.uploads[upload] if upload >= 0 else (None, None, None)
            given = [k for k, t in enumerate(self._call.tensors) if t is source]
            if given:
                del facts.constants[i]
                facts.reads.append(("upload", given[0], tuple(shape or ()), dtype))
            else:
                held = facts.constants[i].reshape(-1).contiguous().view(torch.uint8)
                facts.reads.append(("constant", hashlib.sha256(held.numpy().tobytes()).hexdigest()))

    def _take_numbers(self, facts: Facts) -> None:
        seed, offset = self._state
        after_seed, after_offset = _bindings.rng_state(self.device)
        numbers = self._recording.numbers
        facts.numbers = [value for value, *_ in numbers]
        drawn = after_offset - offset if after_seed == seed else 0
        place = 0
        while place < len(numbers):
            if not numbers[place][1]:
                place += 1
                continue
            far = numbers[place + 1][0] - offset
            if numbers[place][0] == _signed(seed) and 0 <= far < drawn:
                facts.seeds[place] = ("seed", 0)
                facts.seeds[place + 1] = ("offset", far)
            else:
                raise CannotReplay(f"{numbers[place][3]} at {numbers[place][4]} draws from a generator of its own")
            place += 2
        facts.drawn = drawn

    def _take_results(self, facts: Facts) -> None:
        facts.result_spec = self._spec
        changed = {change.storage: change for change in facts.changes}
        aliases, references = _holders(self._result)
        for x in self._result:
            if not isinstance(x, torch.Tensor):
                if x is not None and not isinstance(
                    x, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
                ):
                    raise CannotReplay(
                        f"it returns a {type(x).__name__}; return tensors, numbers and containers of them"
                    )
                facts.results.append(("value", x))
                facts.likes.append(None)
                continue
            given = [k for k, t in enumerate(self._call.tensors) if t is x]
            if given:
                facts.results.append(("argument", given[0]))
                facts.likes.append(None)
                continue
            if x.device.type != "xla" or type(x) not in (torch.Tensor, torch.nn.Parameter):
                raise CannotReplay(f"it returns a tensor on {x.device}, expected one on xla")
            change = changed.get(_id_of(x))
            if change is not None and change.target == ("result",):
                held = sys.getrefcount(x) > _ALIVE + references[id(x)]
                if held or _bindings.count_aliases(x) > aliases.get(_id_of(x), sys.maxsize):
                    raise CannotReplay(f"something keeps a tensor that it returns too, made at {change.line}")
                place: Origin = ("made", _order(facts.changes, change))
            elif x.is_leaf and x.requires_grad:
                facts.results.append(("object", id(x)))
                facts.likes.append(x)
                continue
            else:
                place = change.target if change is not None else self._origin(_id_of(x), facts)
            facts.results.append(("tensor", place, x.requires_grad, tuple(x.shape), x.stride(), x.storage_offset()))
            facts.likes.append(x)
        facts.likes = [like if like is None or like.is_leaf else like.detach() for like in facts.likes]


def _holders(results: Sequence[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """How many tensors of each storage the results keep, and which results are kept by views of them."""
    aliases: dict[int, int] = {}
    found = [x for x in results if isinstance(x, torch.Tensor) and x.device.type == "xla"]
    tensors = {id(x): x for x in found}
    references = {key: sum(x is tensor for x in found) - 1 for key, tensor in tensors.items()}
    for x in found:
        base = x._base
        if base is not None and tensors.setdefault(id(base), base) is base and id(base) in references:
            references[id(base)] += 1
    for x in tensors.values():
        aliases[_id_of(x)] = aliases.get(_id_of(x), 0) + 1
    return aliases, references


def _order(changes: list[Change], wanted: Change) -> int:
    return next(i for i, change in enumerate(changes) if change is wanted)


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed
