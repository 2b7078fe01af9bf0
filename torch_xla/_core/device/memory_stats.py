"""Memory: what a device holds, by the line that made it; what a graph needs; and an error that says both."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla import _bindings, _config, _metrics, _notices
from torch_xla._core.device import client
from torch_xla._core.graph.graph import describe
from torch_xla._errors import LateOutOfMemoryError, OutOfMemoryError, message

ASKED_BY = (_config.XLA_MEMORY_LIMIT_MB,)  # without it `before_run` does nothing

_MIB = 1 << 20
_SHOWN = 5
_SAID = ("resource_exhausted", "out of memory", "can't allocate memory", "cannot allocate memory")  # XLA, PyTorch, OS
_WAYS_OUT = (
    "a smaller batch; torch.utils.checkpoint for the largest layers; torch.autocast('xla', torch.bfloat16); "
    "zero_grad(set_to_none=True) and `del` for what is not needed; loss.item() or .detach() in place of kept losses"
)


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """Tensors of one kind, made by one line, that hold memory of a device.

    Attributes:
        line: The user's line that computed or uploaded them, ``file:line in function``, if known.
        shape: Their shape.
        dtype: Their dtype.
        count: How many there are.
        nbytes: What they hold together, in bytes.
    """

    line: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int
    nbytes: int

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count > 1 else ""
        return (
            f"{in_bytes(self.nbytes)}: {kind_of(self.shape, self.dtype)}{times}, "
            f"made at {self.line or 'an unknown line'}"
        )


def live_tensors(device: int) -> list[LiveTensors]:
    """The tensors that hold memory of a device, largest kind first; pending ones hold none yet."""
    counts: dict[tuple[str | None, tuple[int, ...], torch.dtype], int] = {}
    for meta, pending, line in _bindings.live_tensors(device):
        if meta is not None and not pending:
            counts[line, *meta] = counts.get((line, *meta), 0) + 1
    tensor_kinds = [
        LiveTensors(line, shape, dtype, count, count * size_of(shape, dtype))
        for (line, shape, dtype), count in counts.items()
    ]
    return sorted(tensor_kinds, key=lambda kind: -kind.nbytes)


def before_run(loaded: Any, graph: _bindings.Graph, name: str | None) -> None:
    """Checks a program's need against the limit, where one is set: OutOfMemoryError where it needs more.

    Nothing ran.
    """
    limit = _config.XLA_MEMORY_LIMIT_MB.get() * _MIB
    if not limit:
        return
    stats = compiled_stats(loaded)
    if stats is None:
        return
    results = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    live_bytes = sum(kind.nbytes for kind in live_tensors(graph.device)) + graph.unreferenced_bytes
    if live_bytes + stats.temp_size_in_bytes + results <= limit:
        return
    temporary, requested_bytes = stats.temp_size_in_bytes, stats.temp_size_in_bytes + results
    needs = f"{in_bytes(temporary)} for intermediate values and {in_bytes(results)} for results"
    over = f"needs {needs} beside {in_bytes(live_bytes)} of live tensors; XLA_MEMORY_LIMIT_MB={limit // _MIB}"
    raise OutOfMemoryError(f"{_words(requested_bytes)} {_text(over, graph, name)}")


def compiled_stats(loaded: Any) -> Any | None:
    """XLA's figures of what a program takes; None, which is told once, where a plugin has none."""
    try:
        return loaded.get_compiled_memory_stats()
    except Exception as error:
        _notices.notify(
            "memory", "", f"no memory figures of programs here, so XLA_MEMORY_LIMIT_MB does nothing: {error}"
        )
        _metrics.count("MemoryUnknown")
        return None


def ran_out(error: Exception) -> bool:
    """Whether an error of the client or of the host says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in _SAID)


def explain(error: Exception, graph: _bindings.Graph, name: str | None) -> OutOfMemoryError:
    """The error to raise in place of the client's, where a graph could not be started."""
    problem = f"does not fit into the memory{_reason(error, graph.device)}"
    return OutOfMemoryError(f"{_words(_requested_bytes(error))} {_text(problem, graph, name)}")


def explain_late(error: Exception, device: int) -> LateOutOfMemoryError:
    """The out-of-memory error of a program that failed after it was started."""
    problem = f"[memory] a graph that was started did not fit into the memory{_reason(error, device)}, on xla:{device}"
    lines = [
        f"{_words(_requested_bytes(error))} {problem}",
        *_section("largest live tensors, its results included", map(str, live_tensors(device)[:_SHOWN])),
        f"  what to try: {_WAYS_OUT}",
    ]
    return LateOutOfMemoryError("\n".join(lines))


def explain_host(
    error: Exception, shape: Sequence[int], dtype: torch.dtype, device: int, line: str | None = None
) -> OutOfMemoryError:
    """The out-of-memory error of a transfer for which the host or the device has no room.

    `line` is the user's that made the tensor, if it is another than the one that runs.
    """
    origin = f", made at {line}" if line else ""
    return OutOfMemoryError(
        f"{_words(size_of(tuple(shape), dtype))} [memory] no room for the values of {kind_of(tuple(shape), dtype)} on "
        f"their way to xla:{device}{origin}{_reason(error, device)}; make it smaller, or in parts"
    )


def _words(nbytes: int | None) -> str:
    """PyTorch's words for this error, which libraries look for."""
    tried = "" if nbytes is None else f" Tried to allocate {in_bytes(nbytes, 2, 'bytes')}."
    return f"XLA out of memory.{tried}"


def _requested_bytes(error: Exception) -> int | None:
    """The bytes that could not be allocated, read from XLA's error on CPUs (bytes), GPUs (GiB) and TPUs (G)."""
    match = re.search(r"allocat\w* ([\d.]*\d) ?(bytes|[KMGT])", str(error))
    return None if match is None else int(float(match[1]) * 1024 ** "bKMGT".index(match[2][0]))


def _reason(error: Exception, device: int) -> str:
    stats = client.memory_stats(device) or {}
    limit = f" of {in_bytes(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
    return f"{limit}: {str(error).splitlines()[0].rstrip('.')}"


def _text(what: str, graph: _bindings.Graph, name: str | None) -> str:
    described = describe(graph)
    results = [
        (size_of(meta.shape, meta.dtype), f"{kind_of(meta.shape, meta.dtype)} of {node.op}", node.frame)
        for node in described.nodes
        for meta in node.outs
        if meta is not None
    ]
    largest = sorted(results, key=lambda result: -result[0])[:_SHOWN]
    lines = [
        f"[memory] graph {name or graph.key} {what}, on xla:{graph.device}",
        *_section("largest live tensors", map(str, live_tensors(graph.device)[:_SHOWN])),
        *_section(
            "largest values in the graph",
            (f"{in_bytes(nbytes)}: {kind}, at {frame or 'an unknown line'}" for nbytes, kind, frame in largest),
        ),
        f"  what to try: {_WAYS_OUT}",
    ]
    return "\n".join(lines)


def _section(title: str, rows: Iterable[str]) -> list[str]:
    rows = list(rows)
    return [f"  {title}:", *(f"    {row}" for row in rows)] if rows else []


def size_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def kind_of(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Dtype and shape in one: ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def in_bytes(nbytes: float, digits: int = 1, unit_of_few: str = "B") -> str:
    """A number of bytes with the unit that fits: ``1.5 MiB``."""
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{digits}f} {name}"
    return f"{nbytes:.0f} {unit_of_few}"


def device_memory(index: int) -> dict[str, int]:
    """Memory of a device in bytes: ``bytes_used``, ``bytes_limit`` and ``peak_bytes_used``.

    For CPU devices, which have no memory of their own, the figures are those of this process and its host. Raises
    RuntimeError for a plugin's device that has no figures.
    """
    stats = client.memory_stats(index)
    if stats:
        used = int(stats.get("bytes_in_use", stats.get("bytes_used", 0)))
        limit = int(stats.get("bytes_limit", 0))
        peak = int(stats.get("peak_bytes_in_use", stats.get("peak_bytes_used", used)))
    elif not client.is_own_cpu():
        raise RuntimeError(
            message(
                "memory",
                f"got no statistics of memory from {client.hardware(index)}",
                do="ask torch_xla.debug.memory.live_tensors() what tensors hold",
            )
        )
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        limit = os.sysconf("SC_PHYS_PAGES") * page
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        try:
            with open("/proc/self/statm") as statm:
                used = int(statm.read().split()[1]) * page
        except OSError:  # no such file outside Linux
            used = peak
        peak = max(peak, used)
    return {"bytes_used": used, "bytes_limit": limit, "peak_bytes_used": peak}
