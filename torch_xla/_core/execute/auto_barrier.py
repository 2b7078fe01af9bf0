"""Cuts loops without barriers, as if a barrier stood at the end of the loop's body.

A segment of the loop runs when the next one is recorded: by then its local variables are gone, so that the first, the
middle and the last segments have one program. Only what was recorded and what is alive decide, never time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch_xla import _bindings, _config, _events, _metrics, _notices
from torch_xla._core.device import environment
from torch_xla._core.execute import region
from torch_xla._core.report import debug_level

Run = Callable[[int, _bindings.Cut], None]

_grown: dict[str | None, int] = {}  # per line of a loop that is not cut, its length when that was told


def initialize() -> None:
    """Follows what is recorded from now on, unless the environment says otherwise."""
    _bindings.trace_calls(_config.XLA_AUTO_BARRIER.get())


def look(device: int, run: Run, compiles: Callable[[int], bool]) -> None:
    """Looks for a loop in what was recorded, and cuts those segments of it that are due, to `run` them.

    Where a new graph is compiled on the device, by `compiles`, a loop whose segments are all new graphs is none.
    """
    if region.stack() or not region.allowed or _bindings.is_captured(device):
        return
    if environment.rank_info().world > 1:
        _tell_growth(device)
        return
    if not _bindings.is_looping(device):
        growing = False
        with _events.span("look for a loop"):
            loop = _bindings.find_loop(device)
            if loop is None and not compiles(device):
                growing = True
                loop = _bindings.find_loop(device, growing)
        if loop is None:
            _tell_of_no_loop(device)
            return
        _tell_of_loop(*loop, growing)
    for end in _bindings.segment_ends(device)[:-1]:
        _cut(device, end, run)


def flush(device: int, run: Run, has_program: Callable[[_bindings.Cut], bool | None]) -> list[Exception]:
    """Cuts the segments that are complete, before a barrier or a read; gives what failed, the rest has been started.

    The youngest segment runs only where its program is known, in memory: its variables are alive.
    """
    failed: list[Exception] = []
    ends = _bindings.segment_ends(device)
    for end in ends:
        try:
            if end != ends[-1] or has_program(_bindings.Cut.of_device(device, end)):
                _cut(device, end, run)
        except Exception as error:
            failed.append(error)
    return failed


def _cut(device: int, end: int, run: Run) -> None:
    try:
        with _events.span("barrier", lambda: (debug_level.AUTO, _bindings.user_frame())):
            run(device, _bindings.Cut.of_device(device, end))
    except Exception:
        _bindings.drop_segment_ends(device, end)  # what failed does not come again; what was interrupted does
        raise
    _bindings.drop_segment_ends(device, end)
    _metrics.count("AutoBarrier")


def _tell_of_loop(calls: int, crossing: int, line: str | None, growing: bool) -> None:
    repeat = "repeat in other sizes" if growing else "repeat"
    _tell(
        f"{line}",
        f"a loop without a barrier at {line or 'an unknown line'}: {calls} operators {repeat}, and each such segment "
        f"becomes a graph, as if torch_xla.sync() stood at its end; {crossing} pending values go from one to the next. "
        "Put torch_xla.sync() at the end of its body, or switch this off with "
        "torch_xla.experimental.auto_barrier(False)",
        f"a loop without torch_xla.sync() at {_notices.short(line)} becomes a graph for each turn",
    )


def _tell_of_no_loop(device: int) -> None:
    if _bindings.no_loop_found(device):
        _tell(
            "long",
            f"{_bindings.LONGEST_TRACE} operators were recorded without a barrier, and do not repeat: put "
            f"torch_xla.sync() where a step of the program ends ({_bindings.user_frame() or 'no line'})",
            f"no torch_xla.sync() in {_bindings.LONGEST_TRACE} operators, at {_notices.short(_bindings.user_frame())}",
        )


def _tell_growth(device: int) -> None:
    """Tells of a loop that is not cut, and again where it has become twice as long."""
    loop = _bindings.find_loop(device, follow=False)
    if loop is None:
        _tell_of_no_loop(device)
        return
    calls, _, line = loop
    recorded = _bindings.calls_since_barrier(device)
    if recorded >= 2 * _grown.get(line, 0):
        _grown[line] = recorded
        _tell(
            (line, recorded),
            f"{recorded} operators were recorded without a barrier, in a loop at "
            f"{line or 'an unknown line'} whose {calls} operators repeat; no barrier is put there in a job of "
            "several processes, which must agree on their graphs, so that the graph grows: put torch_xla.sync() at the "
            "end of its body",
            f"the graph of the loop at {_notices.short(line)} grows: no torch_xla.sync() in {recorded} operators",
        )


def _tell(what: Hashable, text: str, brief: str) -> None:
    _notices.advise("barrier", what, text, brief)


def forget() -> None:
    """Tells everything again."""
    _notices.forget("barrier")
    _grown.clear()
