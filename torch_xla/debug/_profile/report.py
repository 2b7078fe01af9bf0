"""Holds a profile's results. Times are in seconds; a moment counts from the start of the profiled block.

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


class _Span:
    """Something that took time; has a start and a length."""

    __slots__ = ()
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class Segment(_Span):
    """A span of time of the host's thread, with what it did; segments do not overlap, and leave no gap."""

    stage: str  # one of `STAGES`
    start: float
    seconds: float
    line: str | None = None  # the user's, where it is known
    why: str | None = None  # ``"a value was read"``, the cause of a barrier, an operator that runs on the host


@dataclass(frozen=True, slots=True)
class StepProfile(_Span):
    """A step: the time between two barriers that ran something, or two ends of a `StepTrace`."""

    number: int  # counted from 0
    start: float
    seconds: float  # how long it took the host
    stages: dict[str, float]  # seconds of the host by stage; their sum is `seconds`
    execute: float  # seconds in which the device was busy, the mean where several were used
    idle: float  # seconds in which it was not
    compiles: int  # graphs that were compiled
    ended: bool = True  # whether a barrier ended it; only the last one may have none


@dataclass(frozen=True, slots=True)
class Run(_Span):
    """One run of a program on a device.

    Its key is the graph's, or `UNCOMPILED`, its line the user's that asked for it.
    """

    device: int
    start: float
    seconds: float
    key: str
    line: str | None


@dataclass(frozen=True, slots=True)
class Gap(_Span):
    """A stretch of time in which a device had nothing to do."""

    device: int
    start: float
    seconds: float
    stage: str  # what the host did for most of it, one of `STAGES`
    name: str  # the same in words, with the line where the cause is one line
    line: str | None  # the user's, at which the host was for most of it


@dataclass(frozen=True, slots=True)
class Compile:
    """A graph that was compiled."""

    start: float  # when its lowering began
    lower: float  # seconds that took
    compile: float  # seconds that XLA took
    key: str
    name: str | None  # given to `torch_xla.compile`, if any
    operators: int
    line: str | None  # the user's, that asked for it
    cause: str  # what asked: a barrier, a value that was read
    again: bool  # whether a similar graph was known from that line
    reason: str  # what differs from it first, or why there is none
    differences: tuple[str, ...] = ()  # all that is known to differ, the first cause first
    # for each run of layers that was made a loop how many there are, and a layer's operators
    loops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that ran on the host."""

    op: str  # ``aten::<name>``
    how: str  # where: between two programs, or inside one
    line: str | None
    count: int  # how often it was met; one inside a program counts when that is lowered
    seconds: float  # how long its inputs were waited for, compiling not counted


@dataclass(frozen=True, slots=True)
class Read:
    """A line at which values went to the host."""

    line: str | None
    count: int  # how many values
    seconds: float  # how long the host stood there, compiling not counted
    divided: int = 0  # for how many of them the host computed small parts of the graph


@dataclass(frozen=True, slots=True)
class Share:
    """Time of the host in one module, or at one line."""

    name: str  # the module's path, ``Model/encoder/layers/3``, or the line
    seconds: float  # time in it, what it calls not counted
    stages: dict[str, float]  # the same by stage
    total: float  # time in it with what it calls; of a line the same as `seconds`
    calls: int = 0  # how often a module was called; 0 for a line


@dataclass(frozen=True, slots=True)
class ProgramProfile:
    """A program that ran, and the memory it needs."""

    key: str
    name: str | None  # given to `torch_xla.compile`, if known
    line: str | None  # the user's, that asked for it
    runs: int  # how often it ran
    seconds: float  # device time of these runs
    arguments: int  # bytes of its inputs
    results: int  # bytes of its results that take no input's place
    temporary: int  # bytes of intermediate values
    peak: int  # bytes of all three


@dataclass(frozen=True, slots=True)
class Growth:
    """Tensors of one kind and line of which there are more than at the start."""

    kind: str  # dtype and shape, ``float32[32, 10]``
    line: str | None
    before: int  # how many there were at the start
    after: int  # how many there are at the end
    nbytes: int  # what the difference holds
    growing: bool  # whether the number rose at most of the looks at it, as it does where a list keeps them


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the devices."""

    # (moment, bytes of live tensors) at the start, at some barriers, at the end
    live: tuple[tuple[float, int], ...] = ()
    growth: tuple[Growth, ...] = ()  # what there is more of at the end, what grew steadily first, largest first


@dataclass(frozen=True, slots=True)
class ModuleCall(_Span):
    """One call of a module's forward; as `Share`."""

    name: str
    start: float
    seconds: float
    depth: int


@dataclass(frozen=True)
class Report:
    """The results of a profile."""

    program: str  # name of the script
    began: float  # seconds since the epoch
    seconds: float  # length of the block
    hardware: str  # what the devices are
    steps: tuple[StepProfile, ...] = ()
    host: tuple[Segment, ...] = ()  # what the host's thread did, without holes
    # what other threads did, by name of the thread
    others: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    gaps: tuple[Gap, ...] = ()  # between the runs
    compiles: tuple[Compile, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    reads: tuple[Read, ...] = ()  # lines at which values were read
    modules: tuple[Share, ...] = ()  # time by module, the most first
    lines: tuple[Share, ...] = ()  # time by line, the most first
    calls: tuple[ModuleCall, ...] = ()
    programs: tuple[ProgramProfile, ...] = ()
    memory: Memory = Memory()
    looked_up: int = 0  # how many new graphs the persistent cache was asked for
    loaded: int = 0  # how many of them it had
    dropped: int = 0  # how many events came after the profile was full

    def waits(self) -> list[tuple[str, int, float]]:
        """The waits of the devices: (name of the gap, how many, seconds), the longest first."""
        totals: dict[str, tuple[int, float]] = {}
        for gap in self.gaps:
            count, seconds = totals.get(gap.name, (0, 0.0))
            totals[gap.name] = count + 1, seconds + gap.seconds
        return sorted(((name, *both) for name, both in totals.items()), key=lambda row: -row[2])
