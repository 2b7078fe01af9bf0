"""Collecting: the context manager, the threads beside it, and what they note."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from torch_xla import _bindings, _events
from torch_xla._core.device import background, client, memory_stats
from torch_xla._core.lower.scopes import ModulePaths

# How often the user's line is looked up, and how soon a thread that wants to run gets to: the interpreter's own 5 ms
# are longer than many steps.
_SAMPLE_SECONDS = 5e-3  # each look takes the GIL from a step that may be as short
# How exactly the end of a program is known.
_LOOK_SECONDS = 5e-5
# How often all live tensors are counted, beside the 1st, 2nd, 4th, 8th … barrier.
_COUNT_SECONDS = 0.25


# Some 200 bytes each; a loop that is profiled for hours must not fill the host's memory.
_MOST_SPANS = 2_000_000


class Span(NamedTuple):
    """A stage of the pipeline, or a wait, of a thread: when it began and was over by `time.perf_counter`."""

    stage: str
    start: float
    end: float
    thread: int
    detail: Any


class Mark(NamedTuple):
    """Something that was noticed at one moment; as `Span`."""

    kind: str
    time: float
    thread: int
    detail: Any


class _Running:
    """A span that is being timed."""

    def __init__(self, to: Collector, stage: str, detail: Any) -> None:
        self._to, self._stage, self._detail = to, stage, detail

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._to.add(self._stage, self._start, perf_counter(), self._detail)


class Finished(NamedTuple):
    """A program that ran: how it was started, by which thread, and when it was over."""

    launch: _events.Launch
    thread: int
    end: float


class Sample(NamedTuple):
    """A sample of the profiled thread: the user's innermost line, and whether PyTorch's DataLoader called it."""

    time: float
    line: str | None
    loading: bool


class Collector(_events.Sink):
    """Everything that is noted while a profile runs."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.dropped = 0
        self.owner = threading.get_ident()
        self.began = time.time()
        self.start = perf_counter()
        self.end = self.start
        self.finished: list[Finished] = []
        self.samples: list[Sample] = []
        self.counts: list[tuple[float, dict[tuple[Any, ...], int]]] = []
        self.names: dict[int, str] = {}
        self.stats: dict[str, Any] = {}
        self._running: list[tuple[_events.Launch, int]] = []  # and by which thread they were started
        self._looking = threading.Lock()
        self._looked = self.start
        self._late: SimpleQueue[Any] = SimpleQueue()  # of tokens
        self._waiter: threading.Thread | None = None
        self._barriers = 0
        self._counted = 0.0

    def span(self, stage: str, detail: Any) -> _Running:
        """Times a stage."""
        return _Running(self, stage, detail)

    def mark(self, kind: str, detail: tuple[Any, ...]) -> None:
        """Keeps a moment."""
        self.marks.append(Mark(kind, perf_counter(), threading.get_ident(), detail))

    def add(self, stage: str, start: float, end: float, detail: Any = None) -> None:
        """Keeps a span of the calling thread, and counts the live tensors at some barriers."""
        thread = threading.get_ident()
        self.keep(Span(stage, start, end, thread, detail))
        if thread not in self.names:
            names = {t.ident: t.name for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
            self.names[thread] = names.get(thread, "")  # PyTorch's own threads, which work for the one that waits
        if stage == "barrier":
            self._barriers += 1
            if self._barriers & (self._barriers - 1) == 0 or end - self._counted > _COUNT_SECONDS:
                self.count_tensors()

    def count_tensors(self) -> None:
        """Counts the live tensors of all devices."""
        start = perf_counter()
        counts: dict[tuple[Any, ...], int] = {}
        if client.client_started():
            for device in range(_bindings.device_count()):
                for kind in memory_stats.live_tensors(device):
                    key = (kind.line, kind.shape, kind.dtype)
                    counts[key] = counts.get(key, 0) + kind.count
        self._counted = perf_counter()
        self.counts.append((start, counts))
        self.keep(Span("profile", start, self._counted, threading.get_ident(), None))

    def keep(self, span: Span) -> None:
        """Keeps a span; and as its thread has the interpreter now, sees which programs are over."""
        if len(self.spans) < _MOST_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1
        if self._running and span.end - self._looked > _LOOK_SECONDS:
            self._look()

    def launched(self, launch: _events.Launch) -> None:
        """Takes notice of a program that was started."""
        self.stats.setdefault(launch.key, launch.executable.loaded)
        self._running.append((launch._replace(executable=None), threading.get_ident()))

    def _look(self) -> None:
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._looked = perf_counter()
            place = 0
            while place < len(self._running):
                launch, thread = self._running[place]
                if _is_over(launch.token):
                    del self._running[place]
                    self.finished.append(Finished(launch._replace(token=None), thread, self._looked))
                else:
                    place += 1
        finally:
            self._looking.release()

    def wait_if_silent(self) -> None:
        """Starts a wait for what runs in another thread, if nobody has looked for long.

        A thread that always did would take the interpreter from a short step twice, which costs it 0.1 ms.
        """
        silent = perf_counter() - self._looked > _SAMPLE_SECONDS / 2
        self._look()
        running = self._running[:1]
        if running and silent and self._late.empty():
            if self._waiter is None:
                self._waiter = background.start("profile-device", self._wait)
            self._late.put(running[0][0].token)

    def _wait(self) -> None:
        while (token := self._late.get()) is not None:
            _finish(token)
            self._look()

    def finish(self) -> None:
        """Waits for the programs that were started."""
        self.end = perf_counter()
        while running := self._running[:1]:
            _finish(running[0][0].token)
            self._look()
        if self._waiter is not None:
            self._late.put(None)
            self._waiter.join()
        over = max((done.end for done in self.finished), default=0.0)
        if over > self.end:
            self.keep(Span("wait", self.end, over, threading.get_ident(), None))
            self.end = over
        self.count_tensors()


def _finish(token: Any) -> None:
    with suppress(Exception):  # it is raised where the program's user waits
        token.block_until_ready()


def _is_over(token: Any) -> bool:
    try:
        return bool(token.is_ready())
    except Exception:  # it failed
        return True


class Sampler:
    """Looks 200 times a second where the profiled thread is."""

    def __init__(self, to: Collector) -> None:
        self._to = to
        self._stopped = False
        self._thread = background.start("profile-lines", self._run)

    def _run(self) -> None:
        while not self._stopped:
            time.sleep(_SAMPLE_SECONDS)  # an event's wait is Python code, for which the step would wait
            self._to.samples.append(Sample(perf_counter(), *_bindings.thread_position(self._to.owner)))
            self._to.wait_if_silent()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


class Modules:
    """Times the forward of every module by hooks that exist only meanwhile, and are as short as can be."""

    def __init__(self, to: Collector) -> None:
        path_of = ModulePaths().find
        opened: list[tuple[torch.nn.Module, str, float]] = []
        owner, me, is_compiling, keep = to.owner, threading.get_ident, torch.compiler.is_compiling, to.keep

        def enter(module: torch.nn.Module, _: Any) -> None:
            if is_compiling() or me() != owner:
                return
            path = path_of(module, opened[-1][1] if opened else None)
            opened.append((module, path, perf_counter()))

        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            if is_compiling() or me() != owner:
                return
            end = perf_counter()
            # A hook that raised may have left others behind.
            while opened:
                inner, path, start = opened.pop()
                if inner is module:
                    keep(Span("module", start, end, owner, (path, len(opened))))
                    return

        self._hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
