"""What a profile found, as data. Times are in seconds; a moment counts from the start of the profiled block.

Lines of the user's program are texts as everywhere in this package: ``file:line in function``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# What the host does, in the order of a step. What is left of a step is `RECORD`: the user's own Python code, and the
# recording of its operators.
RECORD, LOADER, CUT, LOOK_UP, LOWER = "record", "loader", "cut", "look up", "lower"
COMPILE, TRANSFER, START, WAIT, PROFILE = "compile", "transfer", "start", "wait", "profile"
OPERATORS = "operators"
STAGES = (RECORD, LOADER, CUT, LOOK_UP, LOWER, COMPILE, TRANSFER, START, OPERATORS, WAIT, PROFILE)

# The key of a graph that ran operator by operator.
UNCOMPILED = "uncompiled"

# What the devices wait for after their last program.
END = "the end of the block"


class _Stretch:
    """Something that took time; has a start and a length."""

    __slots__ = ()
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class Segment(_Stretch):
    """What the host's thread did over a stretch of time; segments do not overlap, and leave nothing out.

    Attributes:
        stage: One of `STAGES`.
        start: When it began.
        seconds: How long it took.
        line: The user's line, where it is known.
        why: What asked for it: ``"a value was read"``, the cause of a barrier, an operator that runs on the host.
    """

    stage: str
    start: float
    seconds: float
    line: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Step(_Stretch):
    """What lies between two barriers that ran something, or two ends of a `StepTrace`.

    Attributes:
        number: Counted from 0.
        start: When it began.
        seconds: How long it took the host.
        stages: Seconds of the host by stage; their sum is `seconds`.
        execute: Seconds in which the device was busy, the mean where several were used.
        idle: Seconds in which it was not.
        compiles: Graphs that were compiled.
        ended: Whether a barrier ended it; only the last one may have none.
    """

    number: int
    start: float
    seconds: float
    stages: dict[str, float]
    execute: float
    idle: float
    compiles: int
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Run(_Stretch):
    """One run of a program on a device.

    Attributes:
        device: Index of the device.
        start: When it began.
        seconds: How long it took.
        key: Structural key of the graph, or `UNCOMPILED`.
        line: The user's line that asked for it.
    """

    device: int
    start: float
    seconds: float
    key: str
    line: str | None


@dataclass(frozen=True, slots=True)
class Gap(_Stretch):
    """A stretch of time in which a device had nothing to do.

    Attributes:
        device: Index of the device.
        start: When it began.
        seconds: How long it took.
        stage: What the host did for most of it, one of `STAGES`.
        name: The same in words, with the line where the cause is one line.
        line: The user's line at which the host was for most of it.
    """

    device: int
    start: float
    seconds: float
    stage: str
    name: str
    line: str | None


@dataclass(frozen=True, slots=True)
class Compile:
    """A graph that was compiled.

    Attributes:
        start: When its lowering began.
        lower: Seconds that took.
        compile: Seconds that XLA took.
        key: Structural key of the graph.
        name: Name given to `torch_xla.compile`, if any.
        operators: Number of operators.
        line: The user's line that asked for it.
        cause: What asked: a barrier, a value that was read.
        again: Whether a similar graph was known from that line.
        reason: What differs from it first, or why there is none.
        differences: All that is known to differ, the first cause first.
        loops: For each run of layers that was made a loop how many there are, and a layer's operators.
    """

    start: float
    lower: float
    compile: float
    key: str
    name: str | None
    operators: int
    line: str | None
    cause: str
    again: bool
    reason: str
    differences: tuple[str, ...] = ()
    loops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that ran on the host.

    Attributes:
        op: The operator, ``aten::<name>``.
        how: Where: between two programs, or inside one.
        line: The user's line.
        count: How often it was met; one inside a program counts when that is lowered.
        seconds: How long its inputs were waited for, compiling not counted.
    """

    op: str
    how: str
    line: str | None
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Read:
    """A line at which values went to the host.

    Attributes:
        line: The user's line.
        count: How many values.
        seconds: How long the host stood there, compiling not counted.
        divided: For how many of them the host computed small parts of the graph.
    """

    line: str | None
    count: int
    seconds: float
    divided: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """Time of the host in one module, or at one line.

    Attributes:
        name: The module's path, ``Model/encoder/layers/3``, or the line.
        seconds: Time in it, what it calls not counted.
        stages: The same by stage.
        total: Time in it with what it calls; of a line the same as `seconds`.
        calls: How often a module was called; 0 for a line.
    """

    name: str
    seconds: float
    stages: dict[str, float]
    total: float
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """A program that ran, and the memory it needs.

    Attributes:
        key: Structural key of the graph.
        name: Name given to `torch_xla.compile`, if known.
        line: The user's line that asked for it.
        runs: How often it ran.
        seconds: Device time of these runs.
        arguments: Bytes of its inputs.
        results: Bytes of its results that take no input's place.
        temporary: Bytes of intermediate values.
        peak: Bytes of all three.
    """

    key: str
    name: str | None
    line: str | None
    runs: int
    seconds: float
    arguments: int
    results: int
    temporary: int
    peak: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Tensors of one kind and line of which there are more than at the start.

    Attributes:
        kind: Dtype and shape, ``float32[32, 10]``.
        line: The user's line that made them.
        before: How many there were at the start.
        after: How many there are at the end.
        nbytes: What the difference holds.
        growing: Whether the number rose at most of the looks at it, as it does where a list keeps them.
    """

    kind: str
    line: str | None
    before: int
    after: int
    nbytes: int
    growing: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the devices.

    Attributes:
        live: (moment, bytes of live tensors) at the start, at some barriers, at the end.
        growth: What there is more of at the end, what grew steadily first, largest first.
    """

    live: tuple[tuple[float, int], ...] = ()
    growth: tuple[Growth, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleCall(_Stretch):
    """One call of a module's forward; as `Share`."""

    name: str
    start: float
    seconds: float
    depth: int


@dataclass(frozen=True)
class Report:
    """What a profile found.

    Attributes:
        program: Name of the script.
        began: Seconds since the epoch.
        seconds: Length of the block.
        hardware: What the devices are.
        steps: Steps in order.
        host: What the host's thread did, without holes.
        others: What other threads did, by name of the thread.
        runs: Programs as they ran.
        gaps: Between them.
        compiles: Graphs that were compiled.
        fallbacks: Operators that ran on the host.
        reads: Lines at which values were read.
        modules: Time by module, the most first.
        lines: Time by line, the most first.
        calls: Calls of modules.
        programs: What ran, by program.
        memory: Memory.
        looked_up: How many new graphs the persistent cache was asked for.
        loaded: How many of them it had.
        dropped: How many events came after the profile was full.
    """

    program: str
    began: float
    seconds: float
    hardware: str
    steps: tuple[Step, ...] = ()
    host: tuple[Segment, ...] = ()
    others: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    gaps: tuple[Gap, ...] = ()
    compiles: tuple[Compile, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    reads: tuple[Read, ...] = ()
    modules: tuple[Share, ...] = ()
    lines: tuple[Share, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    programs: tuple[Program, ...] = ()
    memory: Memory = Memory()
    looked_up: int = 0
    loaded: int = 0
    dropped: int = 0

    def waits(self) -> list[tuple[str, int, float]]:
        """What the devices waited for: (name of the gap, how many, seconds), the most first."""
        found: dict[str, tuple[int, float]] = {}
        for gap in self.gaps:
            count, seconds = found.get(gap.name, (0, 0.0))
            found[gap.name] = count + 1, seconds + gap.seconds
        return sorted(((name, *both) for name, both in found.items()), key=lambda row: -row[2])
