"""Operators that run on the host: counted as ``aten::<op>``, and told once each, with the user's line."""

from __future__ import annotations

from torch_xla import _events, _metrics, _notices

_line: str | None = None


def lowering_at(line: str | None) -> None:
    """Names the user's line of the node that is being lowered."""
    global _line
    _line = line


def inside_graph(op: str, reason: str) -> None:
    """An operator without a lowering, or of arguments that it does not take: the program calls its CPU kernel."""
    _note(op, f"inside the program: {reason}", _line)


def between_graphs(op: str, reason: str, line: str | None) -> None:
    """An operator that cannot be recorded: what it needs is computed first, and the graph is cut there."""
    _note(op, f"between two programs: {reason}", line)


def _note(op: str, how: str, line: str | None) -> None:
    _metrics.count(op)
    _events.mark("fallback", op, how, line)
    where, text = _notices.short(line), f"{op} runs on the host, {how}"
    _notices.advise("fallback", op, f"{text} ({line or 'at an unknown line'})", f"{where}: {text}")
