"""Declares every environment variable that the package reads: name, type, default, meaning.

An option is read at each `Option.get`, so a script may set it after the import and change it. A value that does not
parse raises `ValueError` with the accepted ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from torch_xla._errors import listing, message

T = TypeVar("T")

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")

_options: dict[str, Option[Any]] = {}

# Every barrier asks for several variables that are not set, and `os.environ` raises and catches an error for each; the
# dictionary behind it answers in a twentieth of that time.
_variables: Any = getattr(os.environ, "_data", os.environ)
_encoded: Callable[[str], Any] = getattr(os.environ, "encodekey", str)


class Option(Generic[T]):
    """One environment variable; `kind` says in words what values look like, `doc` in one sentence what it does."""

    def __init__(self, name: str, kind: str, default: T, doc: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._key = _encoded(name)
        self.kind = kind
        self.default = default
        self.doc = doc
        self._parse = parse
        if name in _options:
            raise ValueError(message("config", f"{name} is declared twice", do="declare it in one place"))
        _options[name] = self

    def get(self) -> T:
        """The value in force; ValueError where the variable holds something else than its type allows."""
        return self.parse(os.environ[self.name]) if self._key in _variables else self.default

    def parse(self, raw: str) -> T:
        """Reads a value from text; `ValueError` names the accepted ones."""
        try:
            return self._parse(raw.strip())
        except (ValueError, KeyError):
            raise ValueError(
                message("config", f"{self.name}={raw!r}", expected=self.kind, do=f"unset it for {self.default!r}")
            ) from None

    def is_set(self) -> bool:
        """Whether the environment gives a value."""
        return self._key in _variables

    def set(self, value: T | None) -> None:
        """Writes the value into the environment, for this process and its children; None removes it."""
        if value is None:
            os.environ.pop(self.name, None)
        else:
            os.environ[self.name] = str(int(value)) if isinstance(value, bool) else str(value)


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A scope in which a context variable has a value."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


@contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """A scope after which some environment variables are as before."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Watch:
    """Options that are mostly not set, asked for at once."""

    def __init__(self, *options: Option[Any]) -> None:
        self._keys = frozenset(option._key for option in options)

    def any_set(self) -> bool:
        """Whether one of them is set, as `Option.is_set` tells of each."""
        return not _variables.keys().isdisjoint(self._keys)


def _bool(name: str, default: bool, doc: str) -> Option[bool]:
    def parse(raw: str) -> bool:
        low = raw.lower()
        if low in _TRUE:
            return True
        if low in _FALSE:
            return False
        raise ValueError(raw)

    return Option(name, "a switch: '1', 'true', 'yes', 'on' or '0', 'false', 'no', 'off'", default, doc, parse)


def _int(name: str, default: int, doc: str, low: int = 0, high: int | None = None) -> Option[int]:
    def parse(raw: str) -> int:
        value = int(raw)
        if value < low or (high is not None and value > high):
            raise ValueError(raw)
        return value

    kind = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"
    return Option(name, kind, default, doc, parse)


def _float(name: str, default: float, doc: str, low: float, high: float) -> Option[float]:
    def parse(raw: str) -> float:
        value = float(raw)
        if not low <= value <= high:
            raise ValueError(raw)
        return value

    return Option(name, f"a number from {low} to {high}", default, doc, parse)


def _text(name: str, default: str | None, doc: str) -> Option[str | None]:
    return Option(name, "text", default, doc, lambda raw: raw or None)


def _choice(name: str, choices: tuple[str, ...], default: str, doc: str) -> Option[str]:
    table = {choice.lower(): choice for choice in choices}
    return Option(name, listing(choices), default, doc, lambda raw: table[raw.lower()])


def _layers(raw: str) -> int:
    value = int(raw)
    if value < 0:
        raise ValueError(raw)
    return value


def _fractions(raw: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in raw.split(":"))
    if not all(0.0 <= value < 1.0 for value in values):
        raise ValueError(raw)
    return values


# Device and processes.
PJRT_DEVICE = _text("PJRT_DEVICE", None, "Kind of device to run on: CPU, CUDA, TPU or the name of an installed plugin.")
XLA_AHEAD = _text(
    "XLA_AHEAD",
    None,
    "Topology to compile for in place of running, such as v5e:8x8, and options of torch_xla.ahead after it.",
)
PJRT_LIBRARY_PATH = _text("PJRT_LIBRARY_PATH", None, "Library of PJRT_DEVICE=LIBRARY, to try one without a package.")
XLA_REGISTER_INSTALLED_PLUGINS = _bool(
    "XLA_REGISTER_INSTALLED_PLUGINS", True, "Whether installed packages are looked through for torch_xla.plugins."
)
# PyTorch counts devices in eight bits, with a sign.
CPU_NUM_DEVICES = _int("CPU_NUM_DEVICES", 1, "Number of CPU devices xla:0, xla:1, … in one process.", low=1, high=127)
PJRT_LOCAL_PROCESS_COUNT = _int("PJRT_LOCAL_PROCESS_COUNT", 1, "Processes of the job on this host.", low=1)
PJRT_LOCAL_PROCESS_RANK = _int("PJRT_LOCAL_PROCESS_RANK", 0, "Rank of this process on its host.")
RANK = _int("RANK", 0, "Rank of this process in its job, set by torchrun and torch_xla.launch.")
WORLD_SIZE = _int("WORLD_SIZE", 1, "Number of processes of the job, set likewise.", low=1)
LOCAL_RANK = _int("LOCAL_RANK", 0, "Rank on this host, set likewise.")
LOCAL_WORLD_SIZE = _int("LOCAL_WORLD_SIZE", 1, "Number of processes of the job on this host, set likewise.", low=1)
MASTER_ADDR = _text("MASTER_ADDR", None, "Host at which the processes of a job meet, set likewise.")
MASTER_PORT = _int("MASTER_PORT", 29500, "Port at which they meet, set likewise.", low=1, high=65535)
TORCHELASTIC_USE_AGENT_STORE = _bool(
    "TORCHELASTIC_USE_AGENT_STORE", False, "Whether who started the processes listens at that port, set likewise."
)
XLA_JOB_TRY = _text("XLA_JOB_TRY", None, "Name of this try of a job, set by torch_xla.launch.")
XLA_CPU_COLLECTIVES = _choice(
    "XLA_CPU_COLLECTIVES", ("torch", "xla"), "torch", "Whose collectives CPU devices use: PyTorch's, or XLA's own."
)
XLA_CPU_KEEP_MEMORY = _bool(
    "XLA_CPU_KEEP_MEMORY", True, "Whether memory that programs on a CPU free is kept for the next run, up to 1 GiB."
)
XLA_JOB_START_TIMEOUT = _float(
    "XLA_JOB_START_TIMEOUT", 300.0, "Seconds in which all processes of a job have to come.", 1.0, 86400.0
)
XLA_COLLECTIVE_TIMEOUT = _float(
    "XLA_COLLECTIVE_TIMEOUT", 1800.0, "Seconds after which a process that waits for others gives up.", 1.0, 86400.0
)
XLA_COLLECTIVE_PATIENCE = _float(
    "XLA_COLLECTIVE_PATIENCE", 10.0, "Seconds after which it tells whom it waits for.", 0.1, 86400.0
)
ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB = _int(
    "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", 0, "MiB of gradients that xm.reduce_gradients sends at once. 0: all."
)
XLA_USE_SPMD = _bool("XLA_USE_SPMD", False, "Asks for SPMD mode.")
XLA_USE_AS_ACCELERATOR = _bool(
    "XLA_USE_AS_ACCELERATOR", False, "Makes xla what torch.accelerator tells of; takes effect at import."
)

# Values on devices.
XLA_USE_32BIT_LONG = _bool(
    "XLA_USE_32BIT_LONG",
    False,
    "Keeps int64 and uint64 in 32 bits on devices, with the nearest number that fits; read once, at the first of them.",
)

# Recording and graphs.
XLA_NO_SPECIAL_SCALARS = _bool(
    "XLA_NO_SPECIAL_SCALARS", False, "Makes the scalars 0 and 1 graph inputs like all others."
)
XLA_IR_DEBUG = _bool(
    "XLA_IR_DEBUG", False, "Keeps eight Python lines of each node instead of one, for messages and dumps."
)
XLA_HLO_DEBUG = _bool(
    "XLA_HLO_DEBUG",
    False,
    "Names module, operator and line in HLO and profiles; takes effect at import, lowers slower.",
)
XLA_SAVE_TENSORS_FILE = _text("XLA_SAVE_TENSORS_FILE", None, "File to which every cut graph is appended.")
XLA_SAVE_TENSORS_FMT = _choice(
    "XLA_SAVE_TENSORS_FMT", ("text", "hlo", "stablehlo", "dot"), "text", "Form of the graphs in XLA_SAVE_TENSORS_FILE."
)
XLA_USE_EAGER_DEBUG_MODE = _bool(
    "XLA_USE_EAGER_DEBUG_MODE", False, "Starts in eager mode: each operation runs at once."
)
XLA_HOST_COMPUTE = _choice(
    "XLA_HOST_COMPUTE",
    ("new", "reads", "never"),
    "new",
    "What PyTorch's CPU kernels compute instead of a program. new: each new graph, operator by operator until it "
    "repeats, where its device is the host; reads: only very small ones behind a value that is read; never: none.",
)

XLA_AUTO_BARRIER = _bool(
    "XLA_AUTO_BARRIER",
    True,
    "Cuts a loop without barriers as if torch_xla.sync() stood in its body; takes effect at import.",
)

XLA_VERIFY_GRAPHS = _bool("XLA_VERIFY_GRAPHS", False, "Checks every cut graph before it is lowered; on in tests.")
XLA_CHECK_VALUES = _bool(
    "XLA_CHECK_VALUES",
    False,
    "Runs graphs operator by operator with PyTorch's CPU kernels: values that they refuse raise, with the line.",
)
XLA_SPMD_VERIFY = _bool(
    "XLA_SPMD_VERIFY",
    False,
    "Runs each program whose tensors are split without the splits too, and names the first value that differs.",
)

# Lowering.
XLA_ROLL_LAYERS: Option[int | None] = Option(
    "XLA_ROLL_LAYERS",
    "0, 1 or a number of layers",
    None,
    "Makes layers that repeat a loop, which XLA compiles once: 1 from eight layers on, a larger number from as many, "
    "0 never. Not set: on TPUs.",
    _layers,
)

# What is told while it runs.
XLA_NOTICES = _choice(
    "XLA_NOTICES",
    ("none", "few", "all"),
    "few",
    "Advice on stderr: what compiles again, loops without a barrier, reads in a step, tensors that pile up, operators "
    "on the host; at most two short lines, or all in full. none, set before the import, also records no user lines.",
)
PT_XLA_DEBUG = _bool("PT_XLA_DEBUG", False, "The same as PT_XLA_DEBUG_LEVEL=2.")
PT_XLA_DEBUG_LEVEL = _int(
    "PT_XLA_DEBUG_LEVEL", 0, "1 prints an analysis of every compile, 2 of every execution as well.", low=-1
)
PT_XLA_DEBUG_FILE = _text("PT_XLA_DEBUG_FILE", None, "File to which the analyses are appended instead of stderr.")
PT_XLA_DEBUG_MAX_FRAME = _int("PT_XLA_DEBUG_MAX_FRAME", 8, "Python frames shown in an analysis.")

# Barrier and metrics.
XLA_SYNC_WAIT = _bool("XLA_SYNC_WAIT", False, "Makes every torch_xla.sync() wait for the device.")
XLA_METRICS_FILE = _text(
    "XLA_METRICS_FILE", None, "File (or STDOUT, STDERR) to which each barrier appends the metrics report."
)
XLA_METRICS_PERCENTILES: Option[tuple[float, ...]] = Option(
    "XLA_METRICS_PERCENTILES",
    "fractions from 0 to below 1 joined by ':', such as '0.01:0.5:0.99'",
    (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99),
    "Percentiles in the metrics report.",
    _fractions,
)
XLA_MAX_ASYNC_QUEUE = _int(
    "XLA_MAX_ASYNC_QUEUE", 100, "Asynchronous step closures that may wait before a step blocks.", low=1
)
RATE_TRACKER_SMOOTHING = _float("RATE_TRACKER_SMOOTHING", 0.4, "Weight of the past in RateTracker.rate().", 0.0, 1.0)

# Profiler.
XLA_PROFILER_ANY_HOST = _bool(
    "XLA_PROFILER_ANY_HOST", False, "Lets profiler servers answer other machines, not this one alone."
)

# Memory.
XLA_MEMORY_LIMIT_MB = _int(
    "XLA_MEMORY_LIMIT_MB", 0, "MiB that a device may hold; a graph that needs more raises before it runs. 0: its own."
)

# Compilation cache.
XLA_PERSISTENT_CACHE_PATH = _text("XLA_PERSISTENT_CACHE_PATH", None, "Folder that keeps compiled graphs between runs.")
XLA_PERSISTENT_CACHE_READ_ONLY = _bool(
    "XLA_PERSISTENT_CACHE_READ_ONLY", False, "Reads that folder, never writes to it."
)
XLA_PERSISTENT_CACHE_MAX_BYTES = _int(
    "XLA_PERSISTENT_CACHE_MAX_BYTES", 10 << 30, "Bytes that folder may have; files used longest ago go first."
)
XLA_PERSISTENT_CACHE_TRUSTED = _bool(
    "XLA_PERSISTENT_CACHE_TRUSTED", False, "Runs programs from that folder though other users can write into it."
)


_PAGE = """\
# Environment variables

All that this package reads of its own and of torch_xla 2.9, made from `torch_xla/_config.py`. Unless its row says
otherwise, a variable is read each time that it matters, so a program may set it after the import. A value of another
form is an error that names the accepted ones.

| variable | default | values | what it does |
|---|---|---|---|"""


def options() -> list[Option[Any]]:
    """All options, by name."""
    return [_options[name] for name in sorted(_options)]


def page() -> str:
    """A page of all options, which is ``docs/environment.md``."""
    rows = [
        f"| `{option.name}` | {'not set' if option.default is None else f'`{option.default}`'} | {option.kind} | "
        f"{option.doc} |"
        for option in _options.values()
    ]
    return "\n".join((_PAGE, *rows, ""))
