"""Listens to the stages while a script runs on described devices, and makes the report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

from torch_xla import _bindings, _events
from torch_xla._core.device import described, memory_stats, shapes
from torch_xla._core.graph.graph import describe
from torch_xla._errors import one_line
from torch_xla.debug._ahead import held, work
from torch_xla.debug._ahead.report import Memory, Program, Report

_BARRIERS, _QUIET = 8, 3  # after so many, and so many of them without a new program, nothing new is expected
_READS = 1000  # single values read in a row, without a barrier or a new program: a loop that waits for one


class Enough(SystemExit):
    """Ends the script: what is to come is like what was, or depends on values. Its `finally` blocks run."""


class _Scopes(threading.local):
    depth = 0


class Collector(_events.Sink):
    """Makes a report; `barriers` is after how many the script ends, None for as many as it takes."""

    def __init__(self, report: Report, barriers: int | None) -> None:
        self.report = report
        self.scopes = _Scopes()
        self._barriers = barriers
        self._new: Program | None = None  # that is being compiled
        self._failed: Program | None = None  # that was just refused
        self._meshes: list[work.Axes] = []
        self._seconds = 0.0  # that the latest compile took
        self._programs: dict[int, Program] = {}  # by the executable
        self._executables: list[Any] = []  # so that none takes another's number
        self._ran = False  # whether a program ran since the last barrier
        self._quiet = 0  # barriers since the last new program
        self._singles = 0
        self._takes: dict[str, Callable[..., None]] = {
            "compile": self._compiles,
            "compiled": self._compiled,
            "refused": self._refused,
        }
        self._takes |= {shapes.RUN: self._runs, shapes.READ: self._reads}

    def span(self, stage: str, detail: Any) -> AbstractContextManager[Any]:
        """Counts barriers, and times compiles."""
        if stage in ("barrier", "read") or stage.endswith("CompileTime"):
            return self._within(stage, detail)
        nothing: AbstractContextManager[Any] = _events.NOTHING
        return nothing

    @contextmanager
    def _within(self, stage: str, detail: Any) -> Iterator[None]:
        start = perf_counter()
        self.scopes.depth += 1
        try:
            yield
        finally:
            self.scopes.depth -= 1
            if stage.endswith("CompileTime"):
                self._seconds = perf_counter() - start
                if self._failed is not None:
                    self._failed.seconds, self._failed = self._seconds, None
        if stage == "read":
            self.read_ended(detail)
        elif stage == "barrier" and not self.scopes.depth:
            self.barrier_ended()

    def mark(self, kind: str, detail: tuple[Any, ...]) -> None:
        """Takes what the report is made of."""
        if kind in self._takes:
            self._takes[kind](*detail)
        elif kind == "mesh":
            self._meshes.append(detail)
        elif kind == "kept":
            self.report.cached += 1
        elif kind == "fallback":
            op, how, line = detail
            self.report.on_host[op] = f"{how} ({line or 'an unknown line'})"

    def _compiles(
        self, key: str, operators: int, line: str, name: str | None, record: Any, known: int, loops: Any
    ) -> None:
        new = record.reason if record is not None else "the first from here" if not known else "unlike those from here"
        self._new = Program(line, name, new, operators, loops=[count for count, _ in loops])
        self._new.refused = "the script ended before the compiler did"
        self.report.programs.append(self._new)
        self._quiet = self._singles = 0

    def _compiled(self, graph: _bindings.Graph, executable: Any) -> None:
        program, self._new = self._new or self._unnamed(graph), None
        program.seconds, program.refused = self._seconds, ""
        self._programs[id(executable.loaded)] = program
        self._executables.append(executable)
        stats = executable.loaded.get_compiled_memory_stats()
        program.memory = Memory(
            stats.argument_size_in_bytes,
            max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0),
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
            limit=described.memory(),
        )
        described_graph = describe(graph)
        work.count(program, described_graph, executable, stats, self._meshes)
        program.live, _ = held.over_time(described_graph)

    def _unnamed(self, graph: _bindings.Graph) -> Program:
        """A program that nobody told of: a single operation in eager mode."""
        program = Program(_bindings.user_frame() or "an unknown line", None, "an operation by itself", graph.num_nodes)
        self.report.programs.append(program)
        return program

    def _refused(self, graph: _bindings.Graph, error: Exception) -> None:
        program, self._new = self._new or self._unnamed(graph), None
        self._failed = program
        program.memory.limit = described.memory()
        program.refused = one_line(error)
        program.live, largest = held.over_time(describe(graph))
        if memory_stats.ran_out(error):
            program.largest = largest

    def _runs(self, loaded: Any, others: int) -> None:
        self._ran = True
        program = self._programs.get(id(loaded))
        if program is not None:
            program.runs += 1
            program.memory.others = max(program.memory.others, others)
        if not self.scopes.depth:  # such as a compiled function of Dynamo's
            self.barrier_ended()

    def _reads(self, line: str | None, aval: Any) -> None:
        self.report.reads[line or "an unknown line"] = self.report.reads.get(line or "an unknown line", 0) + 1
        if aval.size > 1:
            self._singles = 0

    def read_ended(self, line: str | None) -> None:
        """Counts reads, also of what was read before; ends the script where a loop waits for one."""
        self._singles += 1
        if self._singles >= _READS:
            self._singles = 0
            self.end(f"after {_READS:,} values were read in a row without a barrier, at {line}: a loop waits for one")

    def barrier_ended(self) -> None:
        """Counts a barrier in which something ran; ends the script where that was the last one."""
        if not self._ran:
            return
        self._ran = False
        self._singles = 0
        self.report.barriers += 1
        self._quiet += 1
        count = self.report.barriers
        if self._barriers is not None:
            if count >= self._barriers:
                self.end(f"after {count} barriers, as asked")
        elif count >= _BARRIERS and self._quiet > _QUIET:
            self.end(f"after {count} barriers, the last {_QUIET} without a new program (--barriers N for more)")

    def end(self, why: str) -> None:
        """Ends the script."""
        self.report.ended = why
        raise Enough(0)
