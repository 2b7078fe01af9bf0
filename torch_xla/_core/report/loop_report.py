"""Warns of two habits of a loop that cost it every step: a read in the middle of the step, and tensors that pile up.

Each is told once per line, and only where it holds step after step: a wrong alarm is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_xla import _bindings, _config, _notices
from torch_xla._core.device import memory_stats

_IN_A_ROW = 3  # steps, before a read is told
_FIRST_LOOK = 8  # the barrier after which live tensors are counted first; then at twice as many, and so on
_LOOKS = 3  # that must agree
_PER_STEP = 0.9  # tensors of one line that are more with each step
_WORTH = 1 << 20  # bytes


@dataclass(slots=True)
class _Look:
    """The live tensors after so many steps, by the line that made them: how many, and their bytes."""

    step: int
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)


_step = 0
_reads: list[str] = []  # lines that cut this step's graph
_streaks: dict[str, tuple[int, int]] = {}  # by line: the latest step, and how many in a row
_looks: list[_Look] = []


def value_read(outputs: int, device: int) -> None:
    """Takes notice of a program with so many results that ran on a device because a value was read."""
    if _config.XLA_NOTICES.get() == "none":
        return
    if outputs == 1 and not _bindings.has_pending(device):
        _reads.clear()  # nothing of the step was in it, and of what earlier reads left over nothing remains
        return
    line = _bindings.user_frame()
    if line is not None:
        _reads.append(line)


def step_done() -> None:
    """Called after a barrier that ran something: what was read before it broke the graph of the step."""
    global _step
    _step += 1
    if _reads:
        _count_reads()
    if _step >= _FIRST_LOOK and _step.bit_count() == 1:
        _look()


def _count_reads() -> None:
    for line in dict.fromkeys(_reads):
        latest, count = _streaks.get(line, (0, 0))
        count = count + 1 if latest == _step - 1 else 1
        _streaks[line] = (_step, count)
        if count == _IN_A_ROW:
            _notices.advise(
                "loop",
                line,
                f"a value is read in the middle of the step at {line}, {count} steps in a row: the read breaks the "
                "graph in two, and the host waits for the first; read it after the barrier, less often, or in a step "
                "closure",
                f"a value read at {_notices.short(line)} in the middle of each step breaks its graph in two",
            )
    _reads.clear()
    if len(_streaks) > 1000:
        _streaks.clear()


def _look() -> None:
    if _bindings.is_eager() or _config.XLA_NOTICES.get() == "none":
        _looks.clear()
        return
    look = _Look(_step)
    for device in range(_bindings.device_count()):
        for meta, _, line in _bindings.live_tensors(device):
            if meta is not None and line is not None:
                shape, dtype = meta
                count, nbytes = look.lines.get(line, (0, 0))
                look.lines[line] = (count + 1, nbytes + memory_stats.size_of(shape, dtype))
    _looks.append(look)
    del _looks[:-_LOOKS]
    if len(_looks) == _LOOKS:
        growing = [line for line in look.lines if not _notices.was_sent("loop", line) and _grows(line)]
        if growing:
            line = max(growing, key=lambda line: look.lines[line][1])
            count, nbytes = look.lines[line]
            _notices.advise(
                "loop",
                line,
                f"tensors made at {line} pile up: {count} are alive, {memory_stats.in_bytes(nbytes)}, more with each "
                f"step since step {_looks[0].step}; something keeps them, such as a list of losses: keep loss.item() "
                "or loss.detach() there",
                f"tensors made at {_notices.short(line)} pile up with each step: {count} are alive",
            )


def _grows(line: str) -> bool:
    for before, after in zip(_looks, _looks[1:], strict=False):
        more = after.lines.get(line, (0, 0))[0] - before.lines.get(line, (0, 0))[0]
        if more < _PER_STEP * (after.step - before.step):
            return False
    return _looks[-1].lines[line][1] - _looks[0].lines.get(line, (0, 0))[1] >= _WORTH


def forget() -> None:
    """Starts anew, and tells every line again."""
    global _step
    _step = 0
    _reads.clear()
    _streaks.clear()
    _looks.clear()
    _notices.forget("loop")
