"""What one recorded call of a step read, wrote and returned: two calls that agree can be replayed (`replay.py`)."""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from torch_xla import _bindings
from torch_xla._core.device import transfer

# Where something comes from, or goes to: a kind, and what tells it from others of its kind.
Origin = tuple[Any, ...]
_ALIVE = 3  # references to an element of a list that a loop looks at


class CannotReplay(Exception):
    """A step does something that a replay of it would not."""


@dataclass
class Call:
    """The arguments of one call, flat.

    Attributes:
        tensors: The tensors among them; a copy of one that is a view, whose place in its storage may be any.
        numbers: The whole and floating-point numbers.
        key: All else about them: structure, shapes, dtypes, other values.
        own: The views, by position.
    """

    tensors: list[torch.Tensor]
    numbers: list[Any]
    key: Any
    own: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i in _bindings.views_among(self.tensors):
            view = self.tensors[i]
            if not view.requires_grad:
                self.own[i] = view
                self.tensors[i] = view.detach().clone()

    def given(self, i: int) -> torch.Tensor:
        """A tensor as it was passed."""
        return self.own[i] if i in self.own else self.tensors[i]

    def write_back(self) -> None:
        """Copies what was written to copies.

        Raises:
            CannotReplay: Something was.
        """
        written = [i for i in self.own if self.tensors[i]._version > 0]
        with torch.no_grad():
            for i in written:
                self.own[i].copy_(self.tensors[i])
        if written:
            raise CannotReplay("it writes to an argument that is a view; pass the whole tensor")

    @staticmethod
    def flat(args: tuple[Any, ...]) -> Call:
        """Arguments of which the tensors always have the same shapes, and nothing else but numbers varies."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        numbers = () if len(tensors) == len(args) else tuple(x for x in args if not isinstance(x, torch.Tensor))
        return Call(tensors, [], (len(tensors), numbers))

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flattens arguments."""
        leaves: Sequence[Any] = args
        spec: Any = None
        if kwargs or not all(isinstance(x, _FLAT) for x in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors: list[torch.Tensor] = []
        numbers: list[Any] = []
        key: list[Any] = [spec]
        for x in leaves:
            if isinstance(x, torch.Tensor):
                tensors.append(x)
                key.append((x.shape, x.dtype, x.stride(), x.requires_grad, x.device, type(x)))
            elif type(x) in (int, float):
                numbers.append(x)
                key.append(type(x))
            else:
                key.append(x)
        key = tuple(key)  # type: ignore[assignment]
        try:
            hash(key)
        except TypeError as error:
            raise CannotReplay(f"an argument cannot be told from others: {error}") from error
        return Call(tensors, numbers, key)


_FLAT = (torch.Tensor, int, float, str, type(None), torch.dtype, torch.device)


def settings_of(optimizers: Sequence[weakref.ref[Optimizer]]) -> tuple[list[Any], list[Any]]:
    """The numbers in the parameter groups of optimizers, and everything else there but the parameters."""
    numbers: list[Any] = []
    others: list[Any] = []
    for reference in optimizers:
        optimizer = reference()
        if optimizer is None:
            others.append(None)
            continue
        for group in optimizer.param_groups:
            others.append(len(group["params"]))
            for name, value in group.items():
                if name == "params":
                    continue
                for x in value if isinstance(value, (tuple, list)) else (value,):
                    if type(x) in (int, float):
                        numbers.append(x)
                    elif isinstance(x, torch.Tensor):
                        others.append(id(x) if x.device.type == "xla" else (id(x), x.tolist()))
                    else:
                        others.append(x)
    return numbers, others


class Watcher:
    """Notes what a step does while it is recorded: modules that are called, optimizers that take a step."""

    def __init__(self) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self._host_state: dict[int, list[tuple[Any, ...]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A scope in which it does."""

        def called(module: torch.nn.Module, _: Any) -> None:
            self.modules.setdefault(id(module), module)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            if id(optimizer) not in self.optimizers:
                self.optimizers[id(optimizer)] = optimizer
                _count_on_device(optimizer)
                self._host_state[id(optimizer)] = _host_state(optimizer)

        hooks = [register_module_forward_pre_hook(called), register_optimizer_step_pre_hook(stepped)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def counters(self) -> list[torch.Tensor]:
        """Tensors on the host in which optimizers count their steps.

        Raises:
            CannotReplay: One has changed something else there.
        """
        found = []
        for key, optimizer in self.optimizers.items():
            for (name, place, before), (_, _, after) in zip(
                self._host_state[key], _host_state(optimizer), strict=False
            ):
                if before == after:
                    continue
                if place is None or after != before + 1:
                    raise CannotReplay(
                        f"torch.optim.{type(optimizer).__name__} changes '{name}' of its state on the host; use one "
                        "that keeps it on the device, with fused=True or capturable=True"
                    )
                found.append(place)
        return found


_CAN_COUNT_ON_DEVICE = tuple(
    getattr(torch.optim, name) for name in ("Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)


def _count_on_device(optimizer: Optimizer) -> None:
    """Has an optimizer of PyTorch's count its steps on the device, where it can: else each step has other numbers."""
    if not isinstance(optimizer, _CAN_COUNT_ON_DEVICE):
        return
    for group in optimizer.param_groups:
        if group.get("capturable") is not False or group.get("fused"):
            continue
        if not all(p.device.type == "xla" for p in group["params"]):
            continue
        group["capturable"] = True
        group["foreach"] = False  # which PyTorch refuses with it on this device
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for name in ("step", "eta", "mu", "mu_product"):
                value = state.get(name)
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    state[name] = value.to(p.device)


def _host_state(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            continue
        for name, value in state.items():
            if type(value) in (int, float):
                found.append((name, None, value))
            elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1:
                found.append((name, value, value.item()))
    return found


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[tuple[LRScheduler, int]]:
    """The schedulers of optimizers, with the step that each is at."""
    if not optimizers:
        return []
    known = {id(optimizer) for optimizer in optimizers}
    return [
        (x, x.last_epoch)
        for x in gc.get_objects()
        if issubclass(type(x), LRScheduler) and id(getattr(x, "optimizer", None)) in known
    ]


def host_randomness() -> list[Any]:
    """The states of generators on the host."""
    found: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found.append((name, keys.tobytes(), *rest))
    return found


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
    lines: list[str | None]  # of the leaves
    reads: list[Origin] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # host values, by leaf
    numbers: list[Any] = field(default_factory=list)
    seeds: dict[int, tuple[str, int]] = field(default_factory=dict)  # by number: "seed", or "offset" and how far
    drawn: int = 0
    scalars: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)  # storages of tensors; 0 on the host
    had_gradient: list[bool] = field(default_factory=list)
    gradients_then: list[str] = field(default_factory=list)  # "keep", "clear" or "make"
    results: list[Origin] = field(default_factory=list)
    result_spec: Any = None
    likes: list[torch.Tensor | None] = field(default_factory=list)  # per result
    modules: list[tuple[weakref.ref[torch.nn.Module], bool]] = field(default_factory=list)
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    written: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    counters: list[torch.Tensor] = field(default_factory=list)  # on the host; each step adds 1
    complete: bool = True  # whether it knew all parameters from the start

    def forget_values(self) -> None:
        """Lets go of the tensors of the call."""
        self.likes.clear()
        self.constants.clear()

    def structure(self) -> tuple[Any, ...]:
        """What two calls that can be replayed have in common, beside their numbers."""
        return (
            self.key,
            self.reads,
            [(c.target, c.output, c.source) for c in self.changes],
            sorted(self.seeds.items()),
            self.drawn,
            self.others,
            self.had_gradient,
            self.gradients_then,
            self.results,
            str(self.result_spec),
            [id(counter) for counter in self.counters],
            [(reference(), training) for reference, training in self.modules],
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
        optimizers: Likewise.
        latest: What the latest call did that became a graph, by its key.
        pure: It has no effect but on its arguments, and depends on nothing else.
    """

    def __init__(
        self,
        call: Call,
        parameters: Parameters,
        optimizers: Sequence[weakref.ref[Optimizer]],
        latest: dict[str, Facts],
        pure: bool = False,
    ) -> None:
        self._call = call
        self._parameters = parameters
        self._optimizers = optimizers
        self._latest = latest
        self._pure = pure
        self._watcher = Watcher()
        self._seen: list[Facts] = []
        self._result: list[Any] = []
        indices = (t.device.index for t in call.tensors if t.device.type == "xla")
        self.device: int = next(indices, _bindings.current_device())

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls the step, with nothing pending before it."""
        self._gradients = self._parameters.gradients()
        alive = [x for reference in self._optimizers if (x := reference()) is not None]
        self._schedulers = schedulers_of(alive)
        self._scalars = [*self._call.numbers, *settings_of(self._optimizers)[0]]
        self._arguments = [_id_of(t) for t in self._call.tensors]
        self._state = _bindings.rng_state(self.device)
        self._random = [] if self._pure else host_randomness()
        self._recording = _bindings.Recording(self.device)
        try:
            with nullcontext() if self._pure else self._watcher.watching():
                leaves, self._spec = pytree.tree_flatten(function(*args, **kwargs))
            self._result = leaves
        finally:
            self._recording.stop()

    def result(self) -> Any:
        """What the step returned."""
        copies = {id(self._call.tensors[i]): given for i, given in self._call.own.items()}
        return pytree.tree_unflatten([copies.get(id(x), x) for x in self._result], self._spec)

    def see(self, cut: _bindings.Graph, executable: Any) -> None:
        """Takes notice of the graph that the step became and is about to run."""
        self._recording.see(cut)
        facts = Facts(self._recording, cut.device, cut.key, executable, cut.leaf_frames)
        for i, storage in enumerate(self._recording.reads):
            if storage == 0:
                shape, dtype = cut.leaf_metas[i]
                facts.constants[i] = transfer.download(cut.leaf_locations()[i], shape, dtype)
        self._seen.append(facts)

    def graphs(self) -> list[str]:
        """The keys of its graphs."""
        return [facts.key for facts in self._seen]

    def facts(self) -> Facts:
        """What was noted.

        Raises:
            CannotReplay: The step cannot be replayed.
        """
        if len(self._seen) != 1 or self._seen[0].device != self.device:
            raise CannotReplay(f"it became {len(self._seen)} graphs")
        facts = self._seen[0]
        if self._recording.relaid:
            raise CannotReplay("it gives a tensor's storage another size")
        self._take_guards(facts)
        self._take_gradients(facts)
        self._take_changes(facts)
        self._take_reads(facts)
        self._take_numbers(facts)
        self._take_results(facts)
        return facts

    def _take_guards(self, facts: Facts) -> None:
        facts.counters = self._watcher.counters()
        for scheduler, before in self._schedulers:
            if scheduler.last_epoch != before:
                raise CannotReplay(
                    f"torch.optim.lr_scheduler.{type(scheduler).__name__} takes its step inside; take it after the call"
                )
        if not self._pure and host_randomness() != self._random:
            raise CannotReplay("it draws random numbers on the host; draw them outside and pass them, or on the device")
        found = list(self._watcher.optimizers.values())
        facts.optimizers = [weakref.ref(optimizer) for optimizer in found]
        known = [reference() for reference in self._optimizers]
        if [id(x) for x in known] != [id(x) for x in found]:
            facts.complete = False
        numbers, facts.others = settings_of(facts.optimizers)
        facts.scalars = [*self._call.numbers, *numbers]
        if facts.complete and facts.scalars != self._scalars:
            raise CannotReplay("it changes the settings of an optimizer, such as its rate; change them outside")
        facts.modules = [(weakref.ref(module), module.training) for module in self._watcher.modules.values()]
        facts.arguments = self._arguments

    def _take_gradients(self, facts: Facts) -> None:
        touched = self._recording.touched
        leaves = [t for t, _ in touched if t.requires_grad and t.is_leaf]
        facts.written = [weakref.ref(t) for t, written in touched if written]
        if not self._pure and self._parameters.add([*leaves, *self._of_optimizers()]):
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
            for optimizer in self._watcher.optimizers.values()
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
            place += 2
        facts.drawn = drawn

    def _take_results(self, facts: Facts) -> None:
        facts.result_spec = self._spec
        changed = {change.storage: change for change in facts.changes}
        aliases, references = ({}, {}) if self._pure else _holders(self._result)
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
                held = not self._pure and sys.getrefcount(x) > _ALIVE + references[id(x)]
                if held or _bindings.count_aliases(x) > aliases.get(_id_of(x), sys.maxsize):
                    raise CannotReplay(f"something keeps a tensor that it returns too, made at {change.line}")
                place: Origin = ("made", _order(facts.changes, change))
            elif x.is_leaf and x.requires_grad and not self._pure:
                facts.results.append(("object", id(x)))
                facts.likes.append(x)
                continue
            else:
                place = change.target if change is not None else self._origin(_id_of(x), facts)
            facts.results.append(("tensor", place, x.requires_grad and not self._pure, tuple(x.shape), x.stride(), x.storage_offset()))
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
