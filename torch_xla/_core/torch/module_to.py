"""Keeps `torch.nn.Parameter` identity when a module moves to or from ``xla``.

``Module.to`` cannot put an xla tensor under a CPU parameter by assigning ``.data``, so PyTorch would make new
parameters: ties break, and an optimizer built earlier trains the old ones. PyTorch can swap the two tensors instead,
but asks a switch of the whole process. We install a switch that answers for each parameter: yes when exactly one side
is on xla and the swap can work, else no, which is PyTorch's default.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_xla._core import parts
from torch_xla._core.device import client, splits
from torch_xla._errors import LeftBehindError, message

_APPLY = torch.nn.Module._apply.__code__
_LEFT = "_xla_left_behind"

# Number of parameters left behind so far; an optimizer is looked through once per value of it.
_left_behind = 0
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
# The state of each optimizer that was looked through for what its parameters' splits say.
_split: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def _use_count(tensor: torch.Tensor) -> int:
    """Number of C++ references to a tensor."""
    return tensor._use_count()  # type: ignore[attr-defined]


def _can_swap(param: torch.Tensor) -> bool:
    """Whether `torch.utils.swap_tensors` would accept the parameter and its gradient: nobody else holds them."""
    grad = param.grad
    if weakref.getweakrefs(param) or (grad is not None and weakref.getweakrefs(grad)):
        return False
    # The parameter holds its gradient once, the Python object made by asking for it a second time.
    if grad is not None and _use_count(grad) > 2:
        return False
    count = _use_count(param)
    if count <= 1:
        return True
    if count > 2 or not param.is_leaf or not param.requires_grad:
        return False
    # The second holder may be the gradient accumulator of a graph that is still alive, which is harmless; were it
    # another one, asking for the accumulator would have made it, and so a third holder.
    edge = torch.autograd.graph.get_gradient_edge(param)
    only_accumulator = _use_count(param) == 2
    del edge
    return only_accumulator


class _Restore:
    """Gives a swapped parameter its attributes and class back when the frame that swapped it ends."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param
        self.attributes = dict(param.__dict__)
        self.kind = type(param)

    def __del__(self) -> None:
        for name, value in self.attributes.items():
            self.param.__dict__.setdefault(name, value)
        if self.kind is not type(self.param) is torch.nn.Parameter and issubclass(self.kind, torch.nn.Parameter):
            self.param.__class__ = self.kind


class SwapForXla:
    """The value of ``torch.__future__.get_swap_module_params_on_conversion()``; false except as told above."""

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        return frame.f_code is _APPLY and self._wanted(frame)

    def __repr__(self) -> str:
        return "False (True for parameters that move to or from xla)"

    def _wanted(self, frame: FrameType) -> bool:
        names = frame.f_locals
        param, applied = names.get("param"), names.get("param_applied")
        if not isinstance(param, torch.Tensor) or not isinstance(applied, torch.Tensor):
            return False
        if (param.device.type == "xla") == (applied.device.type == "xla"):
            return False
        if not _can_swap(param):
            _mark(param)
            return False
        if param.__dict__ or type(param) is not torch.nn.Parameter:
            # A swap takes attributes and class along; an extra entry lives exactly as long as the frame.
            names.setdefault("_xla_restore", []).append(_Restore(param))
        return True


def _mark(param: torch.Tensor) -> None:
    global _left_behind
    _left_behind += 1
    setattr(param, _LEFT, True)


def _check_left_behind(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if getattr(param, _LEFT, False):
                raise LeftBehindError(
                    message(
                        "optimizer",
                        f"parameter {index} of group {number}, shape {tuple(param.shape)}, was left behind on "
                        f"{param.device} when its module moved to another device",
                        do="build the optimizer after .to('xla')",
                    )
                )
    _checked[optimizer] = _left_behind


def _fill_momentum(optimizer: torch.optim.SGD) -> None:
    """Starts momentum at zero, so that the first step has the same graph as the others.

    SGD takes the first gradient as the buffer, which equals zero momentum plus that gradient unless it is dampened.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"] or group.get("differentiable"):
            continue
        for param in group["params"]:
            if param.grad is None or param.device.type != "xla" or param.grad.is_sparse:
                continue
            if state[param].get("momentum_buffer") is None:
                state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


def _split_loaded(optimizer: Optimizer) -> None:
    """Has a state that was loaded split as its parameters are; one that steps make is so already."""
    for param, state in optimizer.state.items():
        if not isinstance(param, torch.Tensor) or param.device.type != "xla":
            continue
        number = parts.number_of(param)
        if number <= splits.PARTS:
            continue
        for value in state.values():
            alike = isinstance(value, torch.Tensor) and value.device.type == "xla" and value.shape == param.shape
            if alike and parts.number_of(value) <= splits.KNOWN_WHOLE:
                parts.place(value, number, recorded=True)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if client.spmd() and _split.get(optimizer) is not optimizer.state:  # loading gives it another
        _split_loaded(optimizer)
        _split[optimizer] = optimizer.state
    if _left_behind and _checked.get(optimizer) != _left_behind:
        _check_left_behind(optimizer)
    if isinstance(optimizer, torch.optim.SGD) and len(optimizer.state) < sum(
        len(group["params"]) for group in optimizer.param_groups if group["momentum"]
    ):
        _fill_momentum(optimizer)


def install() -> None:
    """Sets the switch, unless the user already asked for swapping, and hooks optimizer steps."""
    if not torch.__future__.get_swap_module_params_on_conversion():
        torch.__future__.set_swap_module_params_on_conversion(SwapForXla())  # type: ignore[arg-type]
    register_optimizer_step_pre_hook(_before_step)
