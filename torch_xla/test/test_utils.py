"""Helpers of test and training scripts: isolated tests, progress lines, TensorBoard summaries."""

from __future__ import annotations

import functools
import multiprocessing
import time
import unittest
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from torch_xla import runtime
from torch_xla.debug import metrics


def mp_test(func: Callable[..., Any]) -> Callable[..., int]:
    """Decorator for a method of `unittest.TestCase`: it runs in a process of its own.

    Args:
        func: The method.

    Returns:
        A method that returns the process's exit code, and fails the test unless that is 0.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> int:
        process = multiprocessing.get_context("fork").Process(target=func, args=args, kwargs=kwargs)
        process.start()
        process.join()
        if args and isinstance(args[0], unittest.TestCase):
            args[0].assertEqual(process.exitcode, 0)
        return process.exitcode or 0

    return wrapper


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Writes numbers to a TensorBoard summary.

    Args:
        summary_writer: The writer; nothing happens without one.
        global_step: Step they belong to.
        dict_to_write: Numbers by name.
        write_xla_metrics: Whether to add the counters, and the number of operations that ran on the host.
    """
    if summary_writer is None:
        return
    values = dict(dict_to_write or {})
    if write_xla_metrics:
        values |= {name: float(metrics.counter_value(name) or 0) for name in metrics.counter_names()}
        values["aten_ops_sum"] = float(sum(metrics.counter_value(n) or 0 for n in metrics.executed_fallback_ops()))
    for name, value in values.items():
        summary_writer.add_scalar(name, value, global_step)


def get_summary_writer(logdir: str | None) -> Any:
    """A TensorBoard writer for a folder; None without one."""
    if not logdir:
        return None
    from torch.utils.tensorboard.writer import SummaryWriter

    writer: Any = SummaryWriter(log_dir=logdir)
    write_to_summary(writer, 0, {"TensorboardStartTimestamp": time.time()})
    return writer


def close_summary_writer(summary_writer: Any) -> None:
    """Writes what is left and closes the writer, if there is one."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def now(format: str = "%H:%M:%S") -> str:
    """The time of day."""
    return datetime.now().strftime(format)


def _print_line(kind: str, device: Any, parts: Mapping[str, Any]) -> None:
    place = f"Device={device}/{runtime.global_ordinal()}"
    shown = [f"{name}={value}" for name, value in parts.items() if value is not None]
    print("|", " ".join([kind, place, *shown, f"Time={now()}"]), flush=True)


def print_training_update(
    device: Any,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Prints a line about a training step.

    Args:
        device: The device.
        step: The step.
        loss: Its loss.
        rate: Examples per second lately.
        global_rate: Examples per second since the start.
        epoch: The epoch.
        summary_writer: Where the rates go too.
    """
    parts = {"Epoch": epoch, "Step": step, "Loss": f"{loss:.5f}"}
    _print_line("Training", device, {**parts, "Rate": f"{rate:.2f}", "GlobalRate": f"{global_rate:.2f}"})
    write_to_summary(summary_writer, None, {"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None) -> None:
    """Prints a line about a test.

    Args:
        device: The device.
        accuracy: In percent.
        epoch: The epoch.
        step: The step.
    """
    shown = None if accuracy is None else f"{accuracy:.2f}"
    _print_line("Test", device, {"Step": step, "Epoch": epoch, "Accuracy": shown})
