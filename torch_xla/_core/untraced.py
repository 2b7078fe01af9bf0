"""Keeps PyTorch's compiler out of this package's work.

A barrier, a read or an upload inside a function under ``torch.compile``, or in a backward pass that such a function
starts, would otherwise have its Python frames, and JAX's, traced and compiled too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

# What `torch.compiler.disable` ends up with; that one imports the compiler, which takes seconds.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Marks a function as one that runs as it is, with all that it calls."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for the compiler, where it would inline it
    return function
