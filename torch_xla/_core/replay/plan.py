"""How the calls of a step that became one graph are replayed."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla import _bindings, _timeline
from torch_xla._core import sync
from torch_xla._core.replay.call import Call, CannotReplay
from torch_xla._core.replay.recorded import Facts, Parameters

_NO_HISTORY = (
    "[replay] backward was called on a result of a step that was replayed, which has no history; compute gradients in "
    "the step"
)
_LIVES, _ARGUMENT, _GRADIENT, _FRESH = range(4)


class Plan:
    """A program of a step, and how its calls are replayed."""

    def __init__(self, facts: Facts) -> None:
        self._guards = facts.guards
        self._fixed = facts.fixed
        self._executable = facts.executable
        self._drawn = facts.drawn
        self._seeds = facts.seeds
        self._varying = sorted(facts.seeds)
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

    def differs(self, call: Call) -> tuple[str, str] | None:
        """What is not as it was when the call was recorded, and how."""
        for k, storage in self._fixed.items():
            if _bindings.tensor_id(call.tensors[k]) != storage:
                return f"argument {k}", "is a tensor that the step does not find elsewhere any more"
        found: tuple[str, str] | None = self._guards.check()
        return found

    def run(self, call: Call) -> tuple[Any, ...] | None:
        """Replays a call; gives what it returns, or None where that cannot be."""
        device = self._replay.device
        values: list[Any] = []
        if self._varying:
            seed, offset = _bindings.rng_state(device)
            signed = seed - (1 << 64) if seed >> 63 else seed
            for place in self._varying:
                kind, far = self._seeds[place]
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
        return spec.type
    return partial(pytree.tree_unflatten, treespec=spec)
