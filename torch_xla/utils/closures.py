"""Runs functions in order, in the calling thread or in a thread of their own, as step closures are run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any

from torch_xla._core.execute import step_closures

Closure = Callable[[], Any]


class ClosureHandler(abc.ABC):
    """Runs closures; a subclass says how."""

    @abc.abstractmethod
    def run(self, closure: Closure) -> None:
        """Runs a closure, or sees that it is run."""

    def run_all(self, closures: Iterable[Closure]) -> None:
        """Runs closures one after the other."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Runs closures in a thread.

    Args:
        max_queue_size: How many may wait before `run` does; ``XLA_MAX_ASYNC_QUEUE`` comes before it.
    """

    def __init__(self, max_queue_size: int = 100) -> None:
        self._runner = step_closures.Runner(max_queue_size)

    def run(self, closure: Closure) -> None:
        """Queues a closure.

        Raises:
            RuntimeError: An earlier one raised; it is the cause.
        """
        self._runner.submit(closure)
