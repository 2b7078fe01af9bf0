"""Appends the metrics report to a file at each barrier, when ``XLA_METRICS_FILE`` names one."""

from __future__ import annotations

import itertools
import sys
import threading

from torch_xla import _config, _files
from torch_xla.debug import metrics

_lock = threading.Lock()
_steps = itertools.count()


def save_metrics(metrics_file: str | None = None) -> None:
    """Appends one report.

    Args:
        metrics_file: Path, ``"STDOUT"`` or ``"STDERR"``; by default what ``XLA_METRICS_FILE`` says, and nothing is
            written if that is not set.

    Raises:
        OSError: The file cannot be written.
    """
    target = metrics_file or _config.XLA_METRICS_FILE.get()
    if target is None:
        return
    with _lock:
        text = f"[MetricsData; step={next(_steps)}]\n{metrics.metrics_report()}\n"
        if target in ("STDOUT", "STDERR"):
            print(text, file=sys.stdout if target == "STDOUT" else sys.stderr)
            return
        with open(target, "a") as file:
            file.write(text)


def at_barrier() -> None:
    """Appends one report to the file of ``XLA_METRICS_FILE``; the program goes on if that cannot be written."""
    target = str(_config.XLA_METRICS_FILE.get())
    try:
        save_metrics(target)
    except OSError as error:
        _files.notify("metrics", "XLA_METRICS_FILE", target, error)
