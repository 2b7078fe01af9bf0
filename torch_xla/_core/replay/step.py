"""Steps that run again without being recorded: when two recorded calls agree, the next are replays of them.

A replay starts the step's program on the tensors that a recorded call would use now, and gives them its results. What
it relies on is looked at before each; where something is not as it was, the call is recorded.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla import _bindings, _metrics, _timeline
from torch_xla._core import pipeline, region, sync
from torch_xla._core.compile.settings import process_settings
from torch_xla._core.replay.call import Call, CannotReplay
from torch_xla._core.replay.numbers import Numbers, same
from torch_xla._core.replay.plan import Plan
from torch_xla._core.replay.recorded import Facts, Parameters, Recorder
from torch_xla._core.report import debug_level, loop_report

_PLANS = 16  # per step and kind of arguments
_KINDS = 256  # of arguments, per step

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
        process_settings(),
    )


class _Calls:
    """Calls with arguments of one kind: what was recorded, and what can be replayed."""

    def __init__(self) -> None:
        self.reads = False  # whether a call did
        self.parameters = Parameters()
        self.optimizers: list[weakref.ref[Any]] = []
        self.previous: Facts | None = None
        self.latest: dict[str, Facts] = {}  # by graph, as all that follows
        self.numbers: dict[str, Numbers] = {}
        self.arguments: dict[str, list[set[int]]] = {}
        self.plans: dict[str, Plan] = {}

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
    """

    def __init__(self, function: Callable[..., Any], name: str, enter: Enter) -> None:
        self._function = function
        self._name = name
        self._enter = enter
        self._calls: dict[Any, _Calls] = {}
        self._moving: dict[int, int | None] = {}
        self._told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if region.stack():
            return self._function(*args, **kwargs)  # a part of what is recorded already
        try:
            call = Call.of(args, kwargs)
        except CannotReplay as reason:
            self._tell(str(reason))
            with self._enter(lambda *_: None, False):
                return self._function(*args, **kwargs)
        call.settle_views(self._moving)
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
                _settle()
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
        with self._enter(see, calls.reads):
            recorder = Recorder(call, calls.parameters, calls.optimizers, calls.latest)
            recorder.run(self._function, args, kwargs)
        if recorder.reads:
            calls.reads, calls.previous = True, None
            return recorder.result()
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
        rules = calls.numbers.setdefault(key, Numbers()).learn(facts)
        seen = calls.arguments.setdefault(key, [set() for _ in facts.arguments])
        for ids, storage in zip(seen, facts.arguments, strict=True):
            ids.add(storage)
            if len(ids) > 2:
                ids.remove(next(iter(ids - {storage})))
        if before is None or before.key != key or not before.complete:
            return
        _compare(before, facts)
        plan = Plan(facts, rules, [len(ids) > 1 for ids in seen])
        plan.bind(facts, calls.parameters)
        calls.plans[key] = plan

    def _tell(self, reason: str) -> None:
        kind = reason[:24]
        if kind not in self._told:
            self._told.add(kind)
            print(f"torch_xla: {self._name} is recorded at each call, not replayed: {reason}", file=sys.stderr)


def _settle() -> None:
    """Computes everything that is pending, before a replay takes it."""
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
        if kind == "value" and not same(one, other):
            raise CannotReplay(f"it returned {one!r}, and {other!r} now; return tensors")
    raise CannotReplay("what it reads, writes or relies on is not the same in each call")
