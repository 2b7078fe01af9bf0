"""The search for argument sets, in a process of its own: what is tried may end or hang a CPU kernel."""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from opdb.compare import Outcome, attempt
from opdb.samples import _pick, tensors_of
from opdb.schema_cases import Case, apply, arguments_on, cases_of
from opdb.schema_inputs import (
    _DTYPES,
    _OTHER_DTYPES,
    _SHAPES,
    Arguments,
    Call,
    Spec,
    functional,
    invoke,
    make,
    overload,
)

_DRAWS = 2000
_ACCEPTED, _REFUSED = 5, 3
_LARGEST = 20_000
_SECONDS = 5
_DEATHS = 12


@dataclass
class Found:
    """What the search found.

    Attributes:
        cases: Calls that the CPU accepts, as different as can be, and gradients of them.
        refused: Calls that it refuses.
        error: An error of an overload that accepts none.
        deaths: Calls that end or hang the CPU's process.
    """

    cases: list[Case] = field(default_factory=list)
    refused: list[Case] = field(default_factory=list)
    error: str = ""
    deaths: list[str] = field(default_factory=list)


class _Trial:
    """Calls that are tried, each counted before it is made, so that whoever waits knows which was the last."""

    def __init__(self, name: str, deadly: set[int], note: Callable[[int, str], None]) -> None:
        self.name, self.deadly, self.note = name, deadly, note
        self.last = max(deadly) if len(deadly) >= _DEATHS else sys.maxsize
        self.count = 0
        self.outcomes: dict[str, tuple[Call, type | None, str]] = {}

    def __call__(self, op: torch._ops.OpOverload, call: Call) -> bool:
        """Whether the CPU accepts a call."""
        key = f"{op}{call}"
        if key in self.outcomes:
            return self.outcomes[key][1] is None
        self.count += 1
        self.note(self.count, key)
        if self.count in self.deadly or self.count > self.last:
            return False
        try:
            arguments = make(call, self.name)
            self.result = invoke(op, arguments)
            del arguments  # what was written beside it shows now
            if sum(t.numel() for t in tensors_of(self.result)) > _LARGEST:
                return False
            outcome: tuple[Call, type | None, str] = (call, None, "")
        except Exception as error:
            outcome = (call, type(error), str(error).split("\n")[0][:200])
        self.outcomes[key] = outcome
        return outcome[1] is None

    def calls(self, op: torch._ops.OpOverload, good: bool) -> list[tuple[Call, type | None, str]]:
        """What was tried of an overload, accepted or refused."""
        return [o for k, o in self.outcomes.items() if k.startswith(f"{op}{{") and (o[1] is None) is good]


def search(name: str, deadly: set[int], note: Callable[[int, str], None]) -> Found:
    """Argument sets of an overload, found by trial in this process."""
    op = overload(name)
    trial = _Trial(name, deadly, note)
    base = functional(op)
    if base is not None:
        _explore(base, trial)
        _write(op, base, trial)
    if not trial.calls(op, True):
        _explore(op, trial)
    result = Found()
    good, bad = trial.calls(op, True), trial.calls(op, False)
    for i in _pick([_traits(op, c, "") for c, _, _ in good], _ACCEPTED):
        trial.count += 1
        note(trial.count, f"gradients of {good[i][0]}")
        if trial.count not in deadly:
            result.cases += cases_of(name, [good[i][0]])
    if good:
        # What differs in one argument from what is accepted: the others may be refused for many reasons at once.
        near = [o for o in bad if any(_distance(o[0], c) == 1 for c, _, _ in good)] or bad
    else:
        near = bad
        result.error = bad[0][2] if bad else ""
    for i in _pick([{(k, m[:20])} for _, k, m in near], _REFUSED):
        case = Case(near[i][0], -1, Outcome())
        case.want = attempt(lambda c=case: apply(name, c, arguments_on(name, c, "cpu"), [], False))
        result.refused.append(case)
    return result


def _explore(op: torch._ops.OpOverload, trial: _Trial) -> None:
    arguments = Arguments(op)
    rng = random.Random(str(op))
    accepted: list[tuple[Call, tuple[int, ...], torch.dtype]] = []
    for shape in _SHAPES:
        for dtype in _DTYPES:
            call = arguments.level(arguments.fixed(shape, dtype))
            if trial(op, call):
                accepted.append((call, shape, dtype))
    draws = 0
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")
    while draws < (60 if accepted or not has_kernel else _DRAWS):
        draws += 1
        shape, dtype = rng.choice(_SHAPES), rng.choice((*_DTYPES, torch.float32, torch.float32))
        call = arguments.level(arguments.drawn(rng, shape, dtype))
        if trial(op, call):
            accepted.append((call, shape, dtype))
    by_shape = {shape: (call, shape, dtype) for call, shape, dtype in reversed(accepted)}
    for call, shape, dtype in list(by_shape.values())[:4]:
        for a in arguments.arguments:
            for value in arguments.choices(a, shape, dtype)[:14]:
                trial(op, arguments.level({**call, a.name: value}))
        for other in (*_DTYPES, *_OTHER_DTYPES):
            trial(op, {k: _cast(v, dtype, other) for k, v in call.items()})


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(v, old, new) for v in value]
    return Spec(new, value.shape, value.fill) if isinstance(value, Spec) and value.dtype == old else value


def _write(op: torch._ops.OpOverload, base: torch._ops.OpOverload, trial: _Trial) -> None:
    outs = [a for a in op._schema.arguments if a.is_out]
    known = trial.calls(base, True)
    for index in _pick([_traits(base, c, "") for c, _, _ in known], 12):
        call = known[index][0]
        shared = {
            a.name: call.get(a.name, a.default_value if a.has_default_value() else None)
            for a in op._schema.arguments
            if not a.is_out
        }
        if not outs:
            trial(op, shared)
            continue
        try:
            results = invoke(base, make(call, trial.name))
        except Exception:
            continue  # it draws, and refuses some numbers
        results = list(results) if isinstance(results, (tuple, list)) and len(outs) > 1 else [results]
        for change in ("", "empty", "dtype", "shape"):
            given = {a.name: _out_like(r, change) for a, r in zip(outs, results, strict=False)}
            if len(given) == len(outs):
                trial(op, {**shared, **given})


def _out_like(result: Any, change: str) -> Any:
    if isinstance(result, (list, tuple)):
        return [_out_like(r, change) for r in result]
    if not isinstance(result, torch.Tensor):
        return Spec(torch.float32, (), "ones")
    shape, dtype = tuple(result.shape), result.dtype
    if change == "empty":
        shape = (0,)
    elif change == "shape":
        shape = (*shape, 2)
    elif change == "dtype":
        dtype = torch.int64 if dtype != torch.int64 else torch.float32
    return Spec(dtype, shape, "ones")


def _distance(a: Call, b: Call) -> int:
    return sum(repr(a[k]) != repr(b[k]) for k in a)


def _traits(op: torch._ops.OpOverload, call: Call, error: str) -> set[Any]:
    traits: set[Any] = {error}
    for k, v in call.items():
        if isinstance(v, Spec):
            traits |= {(k, v.dtype), (k, len(v.shape)), (k, 0 in v.shape)}
        elif isinstance(v, list):
            traits |= {(k, "length", len(v)), (k, type(v[0]) if v else None)}
        else:
            traits.add((k, v if isinstance(v, (bool, str)) or v is None else type(v)))
    return traits


class Searcher:
    """A process that searches; it is started again when it dies."""

    def __init__(self) -> None:
        self.process: Any = None
        self.connection: Connection

    def find(self, name: str) -> Found:
        """Argument sets of an overload."""
        if self.process is None or not self.process.is_alive():
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            # Its memory has guards, so that a kernel that writes beside its tensors is taken for one that dies.
            guarded = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
            with mock.patch.dict(os.environ, guarded):
                self.process.start()
            theirs.close()
        self.connection.send(name)
        try:
            return torch.load(io.BytesIO(self.connection.recv()), weights_only=False)
        except EOFError:
            self.stop()
            return Found(error="its CPU kernel ends the process")

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.connection.close()
            self.process.join(10)
            self.process = None


def _packed(result: Found) -> bytes:
    file = io.BytesIO()
    torch.save(result, file)  # plain pickle does not know all dtypes
    return file.getvalue()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        connection.send(_searched(name))


def _searched(name: str) -> bytes:
    """Searches in forked processes until one lives to the end; what it found, pickled."""
    deadly: set[int] = set()
    deaths: list[str] = []
    while len(deaths) <= _DEATHS:
        memory = mmap.mmap(-1, 4096)

        def note(count: int, text: str, memory: mmap.mmap = memory) -> None:
            coded = text.encode()[:4000]
            memory[: 12 + len(coded)] = struct.pack("QI", count, len(coded)) + coded

        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # of its own time
            signal.alarm(10 * _SECONDS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                result = search(name, deadly, note)
                result.deaths = deaths
                data = _packed(result)
            except BaseException as error:
                data = _packed(Found(error=f"the search failed: {type(error).__name__}: {error}"))
            with os.fdopen(writer, "wb") as file:
                file.write(data)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            data = file.read()
        _, status = os.waitpid(child, 0)
        if data and os.WIFEXITED(status):
            return data
        count, length = struct.unpack("QI", memory[:12])
        deadly.add(count)
        how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
        deaths.append(f"{how}: {memory[12 : 12 + length].decode(errors='replace')}")
    return _packed(Found(error="its CPU kernel ends the process", deaths=deaths))


if __name__ == "__main__":
    searcher = Searcher()
    for n in sys.argv[1:]:
        started = time.perf_counter()
        f = searcher.find(n)
        print(n, f"{time.perf_counter() - started:.2f} s", len(f.cases), len(f.refused), f.error, f.deaths)
        for c in f.cases:
            print("   +", c.leaf, c.compared, c.call)
        for c in f.refused:
            print("   -", c.want.error, c.call)
