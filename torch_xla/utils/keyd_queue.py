"""Bounded queues between threads: one in order, one by key. Reading from a closed and empty one gives None."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class QueueBase:
    """The common base of both queues.

    Args:
        maxsize: Number of items at which writers wait.
    """

    _items: Any

    def __init__(self, maxsize: int = 1024) -> None:
        self._maxsize = maxsize
        self._changed = threading.Condition()
        self._closed = self._finished = False

    def max_size(self) -> int:
        """Number of items at which writers wait."""
        return self._maxsize

    def close(self) -> None:
        """Wakes everybody; what is in it, and what is written from now on, is dropped."""
        with self._changed:
            self._closed = self._finished = True
            self._items.clear()
            self._changed.notify_all()

    def close_write(self) -> None:
        """Tells readers that nothing follows."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _await(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(ready)


class KeydQueue(QueueBase):
    """Items are read by key, in any order."""

    def __init__(self, maxsize: int = 1024) -> None:
        super().__init__(maxsize)
        self._items: dict[Any, Any] = {}
        self._waited: set[Any] = set()

    def put(self, key: Any, item: Any) -> None:
        """Adds an item, when there is room or somebody waits for it."""
        with self._changed:
            self._await(lambda: self._closed or len(self._items) < self._maxsize or key in self._waited)
            if not self._closed:
                self._items[key] = item
                self._changed.notify_all()

    def get(self, key: Any) -> Any:
        """Waits for an item and takes it."""
        with self._changed:
            self._waited.add(key)
            self._changed.notify_all()
            self._await(lambda: self._finished or key in self._items)
            self._waited.discard(key)
            self._changed.notify_all()
            return self._items.pop(key, None)


class Queue(QueueBase):
    """Items are read in the order in which they were written."""

    def __init__(self, maxsize: int = 1024) -> None:
        super().__init__(maxsize)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> bool:
        """Adds an item, when there is room; False where the queue was closed."""
        with self._changed:
            self._await(lambda: self._closed or len(self._items) < self._maxsize)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def get(self) -> Any:
        """Waits for an item and takes it."""
        with self._changed:
            self._await(lambda: self._finished or bool(self._items))
            self._changed.notify_all()
            return self._items.popleft() if self._items else None
