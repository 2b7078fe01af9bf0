"""Small helpers of the original package that scripts import."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import socket
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
Select = Callable[[Any], bool]

# Objects whose attributes are not data.
_OPAQUE = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Cleaner:
    """Calls a function when it is collected."""

    def __init__(self, func: Callable[[], Any]) -> None:
        self.func = func

    def __del__(self) -> None:
        self.func()


class LazyProperty(Generic[T]):
    """A value computed at the first read of `value`."""

    def __init__(self, gen_fn: Callable[[], T]) -> None:
        self._gen_fn: Callable[[], T] | None = gen_fn
        self._value: Any = None

    @property
    def value(self) -> T:
        """The value."""
        if self._gen_fn is not None:
            self._value = self._gen_fn()
            self._gen_fn = None
        return self._value


class TmpFolder:
    """A folder that is removed with the object; its path is `name`."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp()
        self.cleaner = Cleaner(lambda path=self.name: shutil.rmtree(path, ignore_errors=True))  # type: ignore[misc]


class _Steps:
    """Yields what `_make` returns a number of times, and as often again in each loop."""

    def __init__(self, count: int) -> None:
        self._count, self._emitted = count, 0

    def _make(self) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Any:
        again = copy.copy(self)
        again._emitted = 0
        return again

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        """The next step's value, or `StopIteration`."""
        if self._emitted >= self._count:
            raise StopIteration
        self._emitted += 1
        return self._make()


class SampleGenerator(_Steps):
    """A stand-in for a `DataLoader` that yields the same data a number of times.

    Args:
        data: What each step yields.
        sample_count: Number of steps.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        super().__init__(sample_count)
        self._data = data

    def _make(self) -> Any:
        return self._data


class FnDataGenerator(_Steps):
    """Yields ``(data, func(data))`` with ``data = gen_tensor(batch_size, *dims)``, `count` times."""

    def __init__(
        self,
        func: Callable[[Any], Any],
        batch_size: int,
        gen_tensor: Callable[..., Any],
        dims: Iterable[int] | None = None,
        count: int = 1,
    ) -> None:
        super().__init__(count)
        self._func, self._gen_tensor, self._sizes = func, gen_tensor, [batch_size, *(dims or [1])]

    def _make(self) -> tuple[Any, Any]:
        data = self._gen_tensor(*self._sizes)
        return data, self._func(data)


class DataWrapper:
    """Base class for objects of a batch that are not containers but hold tensors."""

    def get_tensors(self) -> list[Any]:
        """The CPU tensors to be sent to the device."""
        raise NotImplementedError(f"{type(self).__name__}.get_tensors")

    def from_tensors(self, tensors: list[Any]) -> Any:
        """A like object with the tensors replaced, given in the order of `get_tensors`."""
        raise NotImplementedError(f"{type(self).__name__}.from_tensors")


def as_list(t: Any) -> Any:
    """A list or tuple as it is, anything else in a list."""
    return t if isinstance(t, tuple | list) else [t]


def getenv_as(name: str, type: Callable[[Any], T], defval: T | None = None) -> T | None:
    """An environment variable converted by ``type``; for `bool` it must hold a number."""
    raw = os.environ.get(name)
    if raw is None:
        return defval
    return type(int(raw)) if type is bool else type(raw)


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether an environment variable is ``true`` or a number above 0."""
    flag = os.getenv(name, default)
    return flag == "true" or (flag.isdigit() and int(flag) > 0)


def for_each_instance(value: Any, select_fn: Select, fn: Callable[[Any], Any]) -> None:
    """Calls ``fn`` once for each selected object in nested containers, objects' attributes included.

    Args:
        value: Any nesting of dicts, lists, tuples, sets, `DataWrapper`s and objects with attributes.
        select_fn: Says which objects are meant; they are not looked into.
        fn: What to do with them.
    """
    visited: dict[int, Any] = {}  # keeps what it saw alive, so that no id is used twice
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in visited:
            continue
        visited[id(item)] = item
        if select_fn(item):
            fn(item)
        else:
            stack.extend(reversed(_children(item)))


def for_each_instance_rewrite(value: Any, select_fn: Select, fn: Callable[[Any], Any]) -> Any:
    """A copy of the nesting with each selected object replaced by ``fn`` of it.

    Containers keep their type and sharing, and the originals are not changed. A selected object met twice is converted
    once.

    Args:
        value: See `for_each_instance`.
        select_fn: Says which objects are replaced.
        fn: Gives the replacement.
    """
    return _rewrite(value, select_fn, fn, {})


def _children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [part for pair in item.items() for part in pair]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, DataWrapper):
        return list(item.get_tensors())
    if hasattr(item, "__dict__") and not isinstance(item, _OPAQUE):
        return list(vars(item).values())
    return []


def _rewrite(value: Any, select: Select, fn: Callable[[Any], Any], done: dict[int, tuple[Any, Any]]) -> Any:
    entry = done.get(id(value))
    if entry is not None:
        return entry[1]

    def keep(result: Any) -> Any:
        done[id(value)] = (value, result)
        return result

    def again(part: Any) -> Any:
        return _rewrite(part, select, fn, done)

    if select(value):
        return keep(fn(value))
    if isinstance(value, dict):
        # Registered before its parts, so that a container may hold itself.
        if isinstance(value, defaultdict):
            table = keep(type(value)(value.default_factory))
        else:
            table = keep({} if type(value) is dict else _emptied(value))
        for key, item in value.items():
            new_key = again(key)  # before the item: in the order of `for_each_instance`
            table[new_key] = again(item)
        return table
    if isinstance(value, list):
        items = keep([] if type(value) is list else _emptied(value))
        items.extend(again(item) for item in value)
        return items
    if isinstance(value, tuple):
        parts = [again(item) for item in value]
        return keep(type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts))
    if isinstance(value, set | frozenset):
        return keep(type(value)(again(item) for item in value))
    if isinstance(value, DataWrapper):
        return keep(value.from_tensors([again(item) for item in value.get_tensors()]))
    if hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        if not _holds(value, select):  # many objects cannot or should not be copied
            return keep(value)
        result = keep(copy.copy(value))
        for name, item in list(vars(value).items()):
            vars(result)[name] = again(item)
        return result
    return value


def _holds(value: Any, select: Select) -> bool:
    matches: list[Any] = []
    for_each_instance(value, select, matches.append)
    return bool(matches)


def _emptied(container: Any) -> Any:
    """A shallow copy without its items, which keeps what a subclass adds to a list or dict."""
    result = copy.copy(container)
    result.clear()
    return result


def shape(inputs: Any) -> list[int]:
    """The shape of nested lists or tuples of equal lengths."""
    if not isinstance(inputs, list | tuple):
        return []
    inner: list[int] | None = None
    for item in inputs:
        part = shape(item)
        if inner is not None and part != inner:
            raise ValueError(f"[shape] got parts of shapes {inner} and {part}, expected equal ones")
        inner = part
    return [len(inputs), *(inner or [])]


def flatten_nested_tuple(inputs: Any) -> tuple[Any, ...]:
    """All items of nested lists and tuples in one tuple."""
    if not isinstance(inputs, list | tuple):
        return (inputs,)
    return tuple(item for part in inputs for item in flatten_nested_tuple(part))


def list_copy_append(ilist: Iterable[Any], item: Any) -> list[Any]:
    """A new list with one more item."""
    return [*ilist, item]


def null_print(*args: Any, **kwargs: Any) -> None:
    """Prints nothing."""


def eprint(*args: Any, **kwargs: Any) -> None:
    """Prints to standard error."""
    print(*args, file=sys.stderr, **kwargs)


def get_print_fn(debug: int | None = None) -> Callable[..., None]:
    """`eprint` when debugging (by default: when ``DEBUG`` is set and not 0), else `null_print`."""
    if debug is None:
        debug = int(os.environ.get("DEBUG", "0"))
    return eprint if debug else null_print


def timed(fn: Callable[[], T], msg: str = "", printfn: Callable[..., None] | None = eprint) -> T:
    """Runs a function and prints its wall time in milliseconds."""
    with TimedScope(msg, printfn):
        return fn()


class TimedScope:
    """Prints the wall time of a block in milliseconds, unless `set_error` was called."""

    def __init__(self, msg: str = "", printfn: Callable[..., None] | None = eprint) -> None:
        self._msg = msg
        self._printfn = printfn or get_print_fn()
        self._error: Any = None
        self._start = 0.0

    def __enter__(self) -> TimedScope:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._error is None:
            self._printfn(f"{self._msg}{1000.0 * (time.perf_counter() - self._start):.3f}ms")

    def set_error(self, error: Any) -> None:
        """Silences the scope."""
        self._error = error


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """Numbers of TCP ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(n)]
        for each in sockets:  # all open at once, so that no port comes twice
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def parallel_work(num_workers: int, fn: Callable[..., T], *args: Iterable[Any]) -> list[T]:
    """Maps ``fn`` over the iterables in threads; an exception of a worker is raised here."""
    with futures.ThreadPoolExecutor(max_workers=num_workers) as executor:
        return list(executor.map(fn, *args))
