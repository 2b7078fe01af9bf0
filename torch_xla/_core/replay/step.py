"""Steps that run again without being recorded: when two recorded calls agree, the next are replays of them.

A replay starts the step's program on the tensors that a recorded call would use now, and gives them its results. What
it relies on is looked at before each; where something is not as it was, the call is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from torch_xla import _bindings, _metrics, _timeline
from torch_xla._core import pipeline, region, sync
from torch_xla._core.compile.settings import process_settings
from torch_xla._core.replay.call import Call, CannotReplay
from torch_xla._core.replay.guards import guards_of
from torch_xla._core.replay.plan import Plan
from torch_xla._core.replay.recorded import Facts, Parameters, Recorder
from torch_xla._core.report import debug_level, loop_report

_PLANS = 16  # per step and kind of arguments
_KINDS = 64  # of arguments, per step
_NUMBERS = 3  # that differ, before it is told

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
        torch.is_anomaly_enabled(),
        _bindings.current_device(),
        *(m.device for m in _function_modes()),
        process_settings(),
    )


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _is_watched() -> bool:
    """Whether something sees calls of PyTorch's operators, of which a replay has none."""
    return bool(torch._C._len_torch_dispatch_stack()) or any(type(m) is not DeviceContext for m in _function_modes())


class _Calls:
    """Calls with arguments of one kind: what was recorded, and what can be replayed."""

    def __init__(self) -> None:
        self.reads = False  # whether a call did
        self.parameters = Parameters()
        self.begun = False  # whether there was one
        self.changed = ""  # what was not as before when the latest was recorded
        self.previous: Facts | None = None
        self.latest: dict[str, Facts] = {}  # by graph, as what follows
        self.plans: dict[str, Plan] = {}


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
        self._numbers: dict[Any, set[tuple[Any, ...]]] = {}  # by kind of all else, the first that were seen
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
        if _is_watched():
            with self._enter(lambda *_: None, False):
                return self._function(*args, **kwargs)
        call.settle_views(self._moving)
        key = call.key, call.numbers, _modes()
        calls = self._calls.get(key)
        if calls is None:
            self._tell_numbers(call)
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
                if plan.differs(call) is not None:
                    continue
                _settle()
                found = plan.run(call)
                if found is not None:
                    _metrics.count("Replay")
                    loop_report.step_done()
                    calls.changed = ""
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
        begun, calls.begun = calls.begun, True
        guards = self._guards(calls)
        with self._enter(see, calls.reads):
            recorder = Recorder(call, calls.parameters, calls.latest, guards)
            recorder.run(self._function, args, kwargs)
        if recorder.reads:
            calls.reads, calls.previous = True, None
            return recorder.result()
        try:
            call.write_back()
            facts = recorder.facts(self._function, self._name)
            self._plan(facts, guards, calls)
            facts.forget_values()
        except CannotReplay as reason:
            calls.previous = None
            for key in recorder.graphs():
                calls.plans.pop(key, None)
            if begun or reason.first:
                self._tell(str(reason))
        return recorder.result()

    def _guards(self, calls: _Calls) -> _bindings.Guards:
        """What the function sees now: as an earlier call did, if it is the same."""
        for facts in reversed(calls.latest.values()):
            if facts.guards.check() is None:
                return facts.guards
        if calls.previous is not None:
            where, how = calls.previous.guards.check() or ("", "")
            if where and where == calls.changed:
                self._tell(f"{where} {how}; keep in a tensor, or pass as one, what is another in each call")
            calls.changed = where
        return guards_of(self._function, self._name)

    def _plan(self, facts: Facts, guards: _bindings.Guards, calls: _Calls) -> None:
        """Makes a plan of two calls that agree."""
        before = calls.latest.pop(facts.key, None)
        calls.previous = calls.latest[facts.key] = facts
        while len(calls.latest) > _PLANS:
            oldest = next(iter(calls.latest))
            del calls.latest[oldest]
            calls.plans.pop(oldest, None)
        if before is None or before.guards is not guards or not (before.complete and facts.complete):
            return
        _compare(before, facts)
        plan = Plan(facts)
        plan.bind(facts, calls.parameters)
        calls.plans.pop(facts.key, None)
        calls.plans[facts.key] = plan

    def _tell_numbers(self, call: Call) -> None:
        """Says so where the numbers among the arguments are others in each call."""
        seen = self._numbers.setdefault(call.key, set())
        seen.add(call.numbers)
        if len(seen) == _NUMBERS:
            varied = [k for k, values in enumerate(zip(*seen, strict=True)) if len(set(values)) == _NUMBERS]
            if varied:
                (_, text), *_ = (numbers[varied[0]] for numbers in seen)
                self._tell(
                    f"a number among its arguments is another in each call, such as {text}; pass it as a tensor, which "
                    "may be on the host"
                )
        if len(seen) > _NUMBERS:
            seen.pop()

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
    for place, (one, other) in enumerate(zip(before.numbers, facts.numbers, strict=True)):
        if place not in facts.seeds and repr(one) != repr(other):
            _, seed, argument, op, line = facts.recording.numbers[place]
            if seed:
                raise CannotReplay(f"{op} at {line} draws from a generator of its own")
            raise CannotReplay(
                f"argument {argument} of {op} at {line} is {other!r} and was {one!r}, for no reason that can be seen; "
                "keep it in a tensor, or pass it as one"
            )
    for (kind, one, *_), (_, other, *_) in zip(before.results, facts.results, strict=False):
        if kind == "value" and repr(one) != repr(other):
            raise CannotReplay(f"it returned {one!r}, and {other!r} now; return tensors")
    raise CannotReplay("what it reads, writes or relies on is not the same in each call")
