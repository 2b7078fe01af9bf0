"""Steps that run again without being recorded: when two recorded calls agree, the next are replays of them.

A replay starts the step's program on the tensors that a recorded call would use now, and gives them its results. What
it relies on is looked at before each; where something is not as it was, the call is recorded.
"""

from __future__ import annotations

import operator
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla import _bindings, _metrics, _timeline
from torch_xla._core import pipeline, region, sync
from torch_xla._core.compile import cache
from torch_xla._core.recorded_step import Call, CannotReplay, Facts, Parameters, Recorder, settings_of
from torch_xla._core.report import debug_level, loop_report

_PLANS = 16  # per step and kind of arguments
_CALLS = 8  # whose numbers are compared
_KINDS = 256  # of arguments, per step
_NO_HISTORY = (
    "[replay] backward was called on a result of a step that was replayed, which has no history; compute gradients in "
    "the step"
)
_LIVES, _ARGUMENT, _GRADIENT, _FRESH = range(4)

Observer = Callable[[Any, Any], None]
# Enters the region of a recorded call: takes what sees its graph, and whether values may be read in it.
Enter = Callable[[Observer, bool], AbstractContextManager[Any]]


def _modes() -> tuple[Any, ...]:
    """What else a recorded call depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cache._settings(),
    )


# What a number may be computed from settings: from one, or from two of them.
_ONE: tuple[Callable[[float], float], ...] = (lambda v: v, lambda v: -v, lambda v: 1 - v)
_TWO: tuple[Callable[[float, float], float], ...] = (
    lambda v, w: 1 - v * w,
    lambda v, w: v * w,
    lambda v, w: -v * w,
)


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and (left == right or (left != left and right != right))


@dataclass(frozen=True)
class _Rules:
    """Which numbers of a program follow which scalars: Python numbers among the arguments, settings of optimizers.

    Attributes:
        scalars: Those of the latest recorded call.
        varied: Per scalar whether it was seen to; what another value of the rest does is not known.
        numbers: By number a function of all scalars.
    """

    scalars: list[Any]
    varied: list[bool]
    numbers: dict[int, Callable[[list[Any]], Any]]

    def fit(self, scalars: list[Any]) -> bool:
        """Whether it is known what these do."""
        return len(scalars) == len(self.scalars) and all(
            on or _same(a, b) for on, a, b in zip(self.varied, scalars, self.scalars, strict=True)
        )


class _Numbers:
    """The numbers of recorded calls that became one graph."""

    def __init__(self) -> None:
        self._seen: list[tuple[list[Any], list[Any]]] = []  # scalars and numbers

    def learn(self, facts: Facts) -> _Rules:
        """The rules that hold for all calls so far.

        Raises:
            CannotReplay: A number differs for no known reason.
        """
        scalars, numbers = facts.scalars, facts.numbers
        if self._seen and (len(self._seen[0][0]), len(self._seen[0][1])) != (len(scalars), len(numbers)):
            self._seen.clear()
        self._seen.append((list(scalars), list(numbers)))
        del self._seen[:-_CALLS]
        first, *others = self._seen
        varied = [not all(_same(s[i], first[0][i]) for s, _ in others) for i in range(len(scalars))]
        rules = {}
        for place, value in enumerate(numbers):
            if place in facts.seeds or all(_same(n[place], value) for _, n in self._seen):
                continue
            rule = self._rule(place, varied)
            if rule is None:
                before = next(n[place] for _, n in self._seen if not _same(n[place], value))
                del self._seen[:-1]
                _, _, argument, op, line = facts.recording.numbers[place]
                raise CannotReplay(
                    f"argument {argument} of {op} at {line} is {value!r} and was {before!r}, for no reason that can be "
                    "seen; pass it as an argument, or keep it in a tensor"
                )
            rules[place] = rule
        return _Rules(list(scalars), varied, rules)

    def _rule(self, place: int, varied: list[bool]) -> Callable[[list[Any]], Any] | None:
        def holds(rule: Callable[[list[Any]], Any]) -> bool:
            return all(rule(scalars) == numbers[place] for scalars, numbers in self._seen)

        indices = [i for i, on in enumerate(varied) if on]
        rules = [partial(_of_one, one, i) for i in indices for one in _ONE]
        rules += [partial(_of_two, two, i, j) for i in indices for j in range(len(varied)) for two in _TWO]
        return next((rule for rule in rules if holds(rule)), None)


def _of_one(function: Callable[[float], float], i: int, scalars: list[Any]) -> Any:
    return function(scalars[i])


def _of_two(function: Callable[[float, float], float], i: int, j: int, scalars: list[Any]) -> Any:
    return function(scalars[i], scalars[j])


class _Plan:
    """A program of a step, and how its calls are replayed."""

    def __init__(self, facts: Facts, rules: _Rules, varied: Sequence[bool]) -> None:
        self._modules = facts.modules
        self._optimizers = facts.optimizers
        self._others = facts.others
        self._rules = rules
        self._arguments = facts.arguments
        self._varied = varied
        self._counters = facts.counters
        self._executable = facts.executable
        self._drawn = facts.drawn
        self._seeds = facts.seeds
        self._varying = sorted({*rules.numbers, *facts.seeds})
        self._makes: list[tuple[str, Any, bool]] = []

    def bind(self, facts: Facts, parameters: Parameters) -> None:
        """Finds the storages of a recorded call, which are those of the next."""
        places: dict[tuple[Any, ...], int] = {}
        table: list[tuple[int, int, int]] = []

        def place(key: tuple[Any, ...], where: int, index: int, storage: int) -> int:
            if key not in places:
                places[key] = len(table)
                table.append((where, index, storage))
            return places[key]

        kept = {change.output: change.storage for change in facts.changes if change.target == ("kept",)}

        def known(origin: tuple[Any, ...], storage: int) -> int:
            kind, index = origin
            if kind == "argument":
                return place(origin, _ARGUMENT, index, storage)
            if kind == "gradient":
                return place(origin, _GRADIENT, index, storage)
            if kind == "carried":
                return place(("storage", kept[index]), _LIVES, 0, kept[index])
            return place(origin, _LIVES, 0, index)

        inputs: list[tuple[int, int]] = []
        constants: list[torch.Tensor] = []
        uploads: list[Any] = []
        storages = facts.recording.reads
        device = torch.device("xla", facts.device)
        for i, origin in enumerate(facts.reads):
            if origin[0] == "constant":
                inputs.append((1, len(constants)))
                constants.append(facts.constants[i].to(device))
            elif origin[0] == "upload":
                inputs.append((2, len(uploads)))
                uploads.append(origin[1:])
            else:
                inputs.append((0, known(origin, storages[i])))
        writes: list[tuple[int, int, int]] = []
        made: dict[int, int] = {}
        gradients: dict[int, int] = {}
        for order, change in enumerate(facts.changes):
            kind = change.target[0]
            if kind == "made gradient":
                target = gradients[change.target[1]] = place((kind, change.storage), _FRESH, 0, change.storage)
            elif kind == "result":
                target = made[order] = place((kind, change.storage), _FRESH, 0, change.storage)
            elif kind == "kept":
                target = place(("storage", change.storage), _LIVES, 0, change.storage)
            else:
                target = known(change.target, change.storage)
            source = 0 if change.source is None else known(change.source, change.copied)
            writes.append((target, change.output, source))
        then = {"keep": 0, "clear": 1, "make": 2}
        described = []
        for j, p in enumerate(parameters.tensors()):
            if p is None:
                raise CannotReplay("a parameter is gone")
            new = (gradients[j], p.grad) if facts.gradients_then[j] == "make" and p.grad is not None else None
            described.append((p, facts.had_gradient[j], then[facts.gradients_then[j]], new))
        results = []
        for origin, like in zip(facts.results, facts.likes, strict=True):
            if origin[0] == "tensor":
                assert like is not None
                kind = origin[1][0]
                storage = _bindings.tensor_id(like)
                results.append((made[origin[1][1]] if kind == "made" else known(origin[1], storage), like))
                self._makes.append(("made", None, origin[2]))
            elif origin[0] == "object":
                self._makes.append(("value", like, False))
            else:
                self._makes.append((origin[0], origin[1], False))
        self._all_made = all(kind == "made" and not differentiable for kind, _, differentiable in self._makes)
        self._container = _container(facts.result_spec)
        held = {storage for where, _, storage in table if where == _LIVES}
        versions = [
            t
            for reference in facts.written
            if (t := reference()) is not None and t.device.type == "xla" and _bindings.tensor_id(t) in held
        ]
        self._replay = _bindings.Replay(
            facts.executable.program,
            facts.recording,
            table,
            inputs,
            constants,
            uploads,
            writes,
            described,
            results,
            self._varying,
            versions,
        )

    def scalars(self, call: Call) -> list[Any] | None:
        """The numbers of a call, if all is as it was when it was recorded."""
        for reference, training in self._modules:
            module = reference()
            if module is None or module.training is not training:
                return None
        numbers, others = settings_of(self._optimizers)
        if others != self._others:
            return None
        scalars = call.numbers + numbers
        if not self._rules.fit(scalars):
            return None
        for tensor, storage, varied in zip(call.tensors, self._arguments, self._varied, strict=True):
            if not varied and tensor.device.type == "xla" and _bindings.tensor_id(tensor) != storage:
                return None
        return scalars

    def run(self, call: Call, scalars: list[Any]) -> tuple[Any, ...] | None:
        """Replays a call; gives what it returns, or None where that cannot be."""
        device = self._replay.device
        values: list[Any] = []
        if self._varying:
            rules, seeds = self._rules.numbers, self._seeds
            seed = offset = 0
            if seeds:
                seed, offset = _bindings.rng_state(device)
                signed = seed - (1 << 64) if seed >> 63 else seed
            for place in self._varying:
                if place in rules:
                    values.append(rules[place](scalars))
                else:
                    kind, far = seeds[place]
                    values.append(signed if kind == "seed" else offset + far)
        start = time.perf_counter()
        with sync._lock:
            found = self._replay.run(call.tensors, values)
        if found is None:
            return None
        token, tensors = found
        if self._drawn:
            state = _bindings.rng_state(device)
            _bindings.set_rng_state(device, state[0], state[1] + self._drawn)
        if self._counters:
            torch._foreach_add_(self._counters, 1)
        if _timeline.recorder is not None:
            _timeline.launched(device, self._replay.key, start, self._executable, token)
        if self._all_made:
            return (self._container(tensors),)
        made = iter(tensors)
        results = []
        for kind, value, differentiable in self._makes:
            if kind == "made":
                tensor = next(made)
                if differentiable:
                    tensor = torch._C._functions.DelayedError(_NO_HISTORY, 1)(tensor.requires_grad_())
                results.append(tensor)
            else:
                results.append(call.given(value) if kind == "argument" else value)
        return (self._container(results),)


def _container(spec: Any) -> Callable[[list[Any]], Any]:
    """What puts results in their places."""
    if spec.is_leaf():
        return operator.itemgetter(0)
    if spec.type in (list, tuple) and all(child.is_leaf() for child in spec.children()):
        return spec.type  # type: ignore[no-any-return]
    return partial(pytree.tree_unflatten, treespec=spec)


class _Calls:
    """Calls with arguments of one kind: what was recorded, and what can be replayed."""

    def __init__(self) -> None:
        self.recorded = 0
        self.parameters = Parameters()
        self.optimizers: list[weakref.ref[Any]] = []
        self.previous: Facts | None = None
        self.latest: dict[str, Facts] = {}  # by graph, as all that follows
        self.numbers: dict[str, _Numbers] = {}
        self.arguments: dict[str, list[set[int]]] = {}
        self.plans: dict[str, _Plan] = {}

    def forget(self, key: str) -> None:
        """Forgets a graph."""
        known: tuple[dict[str, Any], ...] = (self.latest, self.numbers, self.arguments, self.plans)
        for by_graph in known:
            by_graph.pop(key, None)


class Step:
    """A function whose calls are replayed where they can be.

    Args:
        function: The step.
        name: What it is called in messages.
        enter: Enters the region of a recorded call.
        settle: Computes what tensors wait for, before a replay takes them; by default everything that is pending.
        pure: The function has no effect but on its arguments, which are flat, and depends on nothing else.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        enter: Enter,
        settle: Callable[[Sequence[torch.Tensor]], None] | None = None,
        pure: bool = False,
    ) -> None:
        self._function = function
        self._name = name
        self._enter = enter
        self._settle = settle or _settle_all
        self._pure = pure
        self._calls: dict[Any, _Calls] = {}
        self._told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if region.stack:
            return self._function(*args, **kwargs)  # a part of what is recorded already
        try:
            call = Call.flat(args) if self._pure else Call.of(args, kwargs)
        except CannotReplay as reason:
            self._tell(str(reason))
            with self._enter(lambda *_: None, False):
                return self._function(*args, **kwargs)
        key = call.key, _modes()
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= _KINDS:
                del self._calls[next(iter(self._calls))]
            calls = self._calls[key] = _Calls()
        if calls.plans and not pipeline.inspected():
            found = self._replay(call, calls)
            if found is not None:
                return found[0]
        return self._record(call, calls, args, kwargs)

    def _replay(self, call: Call, calls: _Calls) -> tuple[Any, ...] | None:
        with _timeline.span("barrier", lambda: (debug_level.REPLAY, _bindings.user_frame())):
            for plan in reversed(calls.plans.values()):
                scalars = plan.scalars(call)
                if scalars is None:
                    continue
                self._settle(call.tensors)
                found = plan.run(call, scalars)
                if found is not None:
                    _metrics.count("Replay")
                    loop_report.step_done()
                    return found
        return None

    def _record(self, call: Call, calls: _Calls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder: Recorder | None = None

        def see(cut: Any, executable: Any) -> None:
            if recorder is not None:
                recorder.see(cut, executable)

        if call.own:
            swapped = {id(given): call.tensors[i] for i, given in call.own.items()}
            args, kwargs = pytree.tree_map(lambda x: swapped.get(id(x), x), (args, kwargs))
        if self._pure:
            self._settle(call.tensors)
        with self._enter(see, calls.recorded > 0):
            recorder = Recorder(call, calls.parameters, calls.optimizers, calls.latest, self._pure)
            recorder.run(self._function, args, kwargs)
        calls.recorded += 1
        try:
            call.write_back()
            facts = recorder.facts()
            self._plan(facts, calls)
            facts.forget_values()
        except CannotReplay as reason:
            calls.previous = None
            for key in recorder.graphs():
                calls.plans.pop(key, None)
            self._tell(str(reason))
        return recorder.result()

    def _plan(self, facts: Facts, calls: _Calls) -> None:
        """Makes a plan of two calls that agree."""
        key = facts.key
        previous, calls.previous = calls.previous, facts
        calls.optimizers = facts.optimizers
        if not facts.complete:
            return
        before = calls.latest.get(key) if key in calls.plans else previous
        calls.latest[key] = facts
        while len(calls.latest) > _PLANS:
            calls.forget(next(iter(calls.latest)))
        rules = calls.numbers.setdefault(key, _Numbers()).learn(facts)
        seen = calls.arguments.setdefault(key, [set() for _ in facts.arguments])
        for ids, storage in zip(seen, facts.arguments, strict=True):
            ids.add(storage)
            if len(ids) > 2:
                ids.remove(next(iter(ids - {storage})))
        if before is None or before.key != key or not before.complete:
            return
        _compare(before, facts)
        plan = _Plan(facts, rules, [self._pure or len(ids) > 1 for ids in seen])
        plan.bind(facts, calls.parameters)
        calls.plans[key] = plan

    def _tell(self, reason: str) -> None:
        kind = reason[:24]
        if kind not in self._told:
            self._told.add(kind)
            print(f"torch_xla: {self._name} is recorded at each call, not replayed: {reason}", file=sys.stderr)


def _settle_all(_: Sequence[torch.Tensor]) -> None:
    for device in range(_bindings.device_count()):
        if _bindings.has_pending(device):
            sync.sync(device, cause=debug_level.COMPILE_ENTRY)


def _compare(before: Facts, facts: Facts) -> None:
    """Refuses two calls that differ in what a replay cannot see.

    Raises:
        CannotReplay: They do.
    """
    for change in before.changes:
        if change.target == ("kept",) and facts.recording.lives(change.storage):
            raise CannotReplay(f"it keeps a tensor of each call, made at {change.line}; return it instead")
    if before.structure() == facts.structure():
        return
    for one, other, line in zip(before.reads, facts.reads, facts.lines, strict=True):
        if one != other and (other[0] == "constant" or other[0] == one[0] == "storage"):
            which = "copies a value of the host's" if other[0] == "constant" else "reads a tensor"
            raise CannotReplay(f"it {which} that is another in each call, made at {line}; pass it as an argument")
    for (kind, one, *_), (_, other, *_) in zip(before.results, facts.results, strict=False):
        if kind == "value" and not _same(one, other):
            raise CannotReplay(f"it returned {one!r}, and {other!r} now; return tensors")
    raise CannotReplay("what it reads, writes or relies on is not the same in each call")
