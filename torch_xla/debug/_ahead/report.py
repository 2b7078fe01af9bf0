"""What is found out about a script: its programs, what they need and cost, and what else chips would not do so."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Memory:
    """Bytes of one chip while a program runs."""

    arguments: int = 0
    results: int = 0  # beside those that take an argument's place
    temporaries: int = 0
    code: int = 0
    others: int = 0  # of tensors that live meanwhile and are not its arguments
    limit: int = 0  # what programs may use; 0 where that is not known

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.arguments + self.results + self.temporaries + self.code + self.others

    @property
    def fits(self) -> bool:
        """Whether the chip has so much."""
        return not self.limit or self.total <= self.limit


@dataclass
class Collective:
    """The collectives of a program that are of one kind and over the same devices."""

    kind: str
    count: int  # in a run, those in loops as often as these
    nbytes: int  # of their results on a chip, in a run
    group: int  # how many chips take part in each
    axes: str  # the axes of the user's mesh that they are over, where there is one

    @property
    def received(self) -> float:
        """Bytes that a chip has to receive from others, at least."""
        share = (self.group - 1) / self.group if self.group else 0.0
        shares = {"reduce-scatter": self.group - 1, "collective-permute": 1, "all-reduce": 2 * share}
        return self.nbytes * shares.get(self.kind, share)


@dataclass
class Held:
    """Values that take memory at the peak of a program that does not fit, those alike as one."""

    nbytes: int  # of a chip, of all of them; where devices share a program, if it is split evenly
    shape: str  # of one, of all chips, with its dtype
    what: str  # the operator, and the module that it is of
    line: str | None
    kept: bool  # for the backward pass
    count: int


@dataclass
class Program:
    """A program that the script compiled."""

    line: str  # of the user's that asked for it
    name: str | None
    new: str  # why it is new
    operators: int
    seconds: float = 0.0  # to compile
    runs: int = 0
    memory: Memory = field(default_factory=Memory)
    flops: float = 0.0  # of a chip in a run: of the products and convolutions that were recorded
    nbytes: float = 0.0  # that go to or from a chip's memory at least
    collectives: list[Collective] = field(default_factory=list)
    theory: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # bytes a chip that collectives must have, by what they are for and their kind
    loops: list[int] = field(default_factory=list)  # how often the loops of layers run
    refused: str = ""  # the compiler's reason, where it did not compile it
    largest: list[Held] = field(default_factory=list)
    # (operators computed, bytes of a chip that live then), in the order of recording
    live: list[tuple[int, int]] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)  # seconds that a run takes at least, by what bounds it

    @property
    def fits(self) -> bool:
        """Whether a chip can run it."""
        return not self.refused and self.memory.fits


@dataclass
class Report:
    """What came of a script."""

    script: str
    topology: str
    chips: int
    processes: int  # of the job
    rank: int  # which of them this was
    compiler: str
    programs: list[Program] = field(default_factory=list)
    barriers: int = 0
    reads: dict[str, int] = field(default_factory=dict)  # how many values were read, by line
    on_host: dict[str, str] = field(default_factory=dict)  # operators that ran on the host, and how
    unwritten: dict[str, int] = field(default_factory=dict)  # what was not written, and how often
    cached: int = 0  # programs that were kept for slices
    ended: str = ""  # why the script did not run to its end
    failed: str = ""  # the error that ended it

    @property
    def fits(self) -> bool:
        """Whether chips can run all programs."""
        return all(program.fits for program in self.programs)

    def as_json(self) -> dict[str, Any]:
        """All of it, and what follows from it."""
        found = asdict(self) | {"fits": self.fits}
        for row, program in zip(found["programs"], self.programs, strict=True):
            row["fits"] = program.fits
            row["memory"]["total"] = program.memory.total
        return found
