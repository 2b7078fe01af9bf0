"""Names HLO operations by the module that recorded them, for dumps and profiles (``XLA_HLO_DEBUG=1``)."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as hooks

from torch_xla import _bindings, _config

R = TypeVar("R")


class ModulePaths:
    """Names modules by where they are below the outermost one that was called: ``Model/encoder/layers/3/attn``."""

    def __init__(self) -> None:
        self._paths: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def find(self, module: torch.nn.Module, around: str | None) -> str:
        """The path of a module that is being called, of that of the module around it that calls it, if one does."""
        path = self._paths.get(module)
        if path is None:
            root = type(module).__name__
            path = f"{around}/{root}" if around else root
            # What was called by itself before belongs to the larger module from now on.
            for name, child in module.named_modules():
                self._paths[child] = "/".join([path, *filter(None, name.split("."))])
        return path


_mine = threading.local()
_paths = ModulePaths()


def on() -> bool:
    """Whether paths are kept."""
    return _config.XLA_HLO_DEBUG.get()


def install() -> None:
    """Follows the modules of the program; called once, at import."""
    if on():
        hooks.register_module_forward_pre_hook(_enter)
        hooks.register_module_forward_hook(_leave, always_call=True)


def _stack() -> list[str]:
    if not hasattr(_mine, "stack"):
        _mine.stack = []
    stack: list[str] = _mine.stack
    return stack


def _enter(module: torch.nn.Module, _: Any) -> None:
    stack = _stack()
    stack.append(_paths.find(module, stack[-1] if stack else None))
    _bindings.set_scope(stack[-1])


def _leave(*_: Any) -> None:
    stack = _stack()
    if stack:
        stack.pop()
    _bindings.set_scope(stack[-1] if stack else "")


def call_at(frame: str | None, function: Callable[[], R]) -> R:
    """Calls a function from the user's line, so that whoever looks at the stack finds it there.

    The line is ``file:line in function``, or None where it is not known.
    """
    frame = frame or "<unknown>:1 in backward"  # rather than the line of the barrier
    place, _, name = frame.split(" < ")[0].rpartition(" in ")
    file, _, line = place.rpartition(":")
    code = _call.__code__.replace(co_filename=file, co_firstlineno=int(line), co_name=name, co_qualname=name)
    result: R = types.FunctionType(code, {})(function)
    return result


# In one line, so that its first line is that of the call.
_call = lambda function: function()  # noqa: E731
