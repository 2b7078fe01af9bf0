"""Random programs of views, in-place writes and reads, as hypothesis makes them; the same text runs on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

Pick = Callable[[int], int]  # pick(n) is a number below n


def _dim(x: Tensor, pick: Pick) -> int:
    return pick(x.dim())


VIEWS: dict[str, Callable[[Tensor, Pick], Tensor]] = {
    "transpose": lambda x, pick: x.transpose(_dim(x, pick), _dim(x, pick)),
    "select": lambda x, pick: x.select((d := _dim(x, pick)), pick(x.size(d))),
    "narrow": lambda x, pick: x.narrow((d := _dim(x, pick)), (s := pick(x.size(d))), 1 + pick(x.size(d) - s)),
    "step": lambda x, pick: x[:: 1 + pick(3)],
    "unsqueeze": lambda x, pick: x.unsqueeze(pick(x.dim() + 1)),
    "squeeze": lambda x, pick: x.squeeze(),
    "flip_dims": lambda x, pick: x.permute(*reversed(range(x.dim()))),
    "reshape": lambda x, pick: x.reshape(-1),
    "view_as_self": lambda x, pick: x.view(x.shape),
    "detach": lambda x, pick: x.detach(),
    "data": lambda x, pick: x.data,
    "split": lambda x, pick: (parts := x.split(1 + pick(3), _dim(x, pick)))[pick(len(parts))],
    "chunk": lambda x, pick: (parts := x.chunk(2, _dim(x, pick)))[pick(len(parts))],
    "unbind": lambda x, pick: (parts := x.unbind(_dim(x, pick)))[pick(len(parts))],
    "diagonal": lambda x, pick: x.diagonal(pick(3) - 1) if x.dim() > 1 else x,
    "unfold": lambda x, pick: x.unfold((d := _dim(x, pick)), 1 + pick(x.size(d)), 1 + pick(2)),
    "expand": lambda x, pick: x.unsqueeze(0).expand(2, *x.shape),
    "as_strided": lambda x, pick: x.as_strided((1 + pick(2), 1 + pick(2)), (2, 1), pick(3)),
    "new": lambda x, pick: x * 2 + 1,
    "clone": lambda x, pick: x.clone(),
    "contiguous": lambda x, pick: x.contiguous(),
}


def _write(x: Tensor, value: Tensor | float) -> None:
    x.copy_(value if isinstance(value, Tensor) else torch.full_like(x, value))


WRITES: dict[str, Callable[[Tensor, Tensor, Pick], object]] = {
    "add_": lambda x, y, pick: x.add_(pick(5)),
    "mul_": lambda x, y, pick: x.mul_(0.5),
    "add_other": lambda x, y, pick: x.add_(y.sum() * 0.125),
    "fill_": lambda x, y, pick: x.fill_(float(pick(9))),
    "zero_": lambda x, y, pick: x.zero_(),
    "copy_": lambda x, y, pick: x.copy_(x.flip(0) if x.dim() else x + 1),
    "set_first": lambda x, y, pick: x.__setitem__(0, float(pick(9))) if x.dim() else x.add_(1),
    "masked_fill_": lambda x, y, pick: x.masked_fill_(x > 4, -1.0),
    "out": lambda x, y, pick: torch.add(x, 1, out=x),
    "clamp_": lambda x, y, pick: x.clamp_(-3, 3),
}


@dataclass(frozen=True)
class Step:
    """One line of a program: an operation, the tensor it works on, and the numbers it picks."""

    name: str
    on: int
    other: int
    picks: tuple[int, ...]


steps = st.builds(
    Step,
    name=st.sampled_from([*VIEWS, *WRITES]),
    on=st.integers(0, 1000),
    other=st.integers(0, 1000),
    picks=st.tuples(*[st.integers(0, 1000)] * 4),
)
programs = st.lists(steps, min_size=1, max_size=14)


def run(program: list[Step], device: str, barrier: Callable[[], None] | None = None) -> list[Tensor] | str:
    """All tensors of the program at its end, or the type and text of the exception that ended it.

    Args:
        program: The steps.
        device: Where the tensors live.
        barrier: Called after every third step, on a device that has one.
    """
    tensors = [torch.arange(24.0, device=device).reshape(4, 6)]
    for line, step in enumerate(program):
        picks = iter(step.picks)

        def pick(n: int, picks: object = picks) -> int:
            return next(picks) % n if n > 0 else 0  # type: ignore[call-overload]

        x = tensors[step.on % len(tensors)]
        y = tensors[step.other % len(tensors)]
        if step.name in VIEWS:
            if (x.dim() == 0 or x.numel() == 0) and step.name not in ("unsqueeze", "new", "clone"):
                continue
            try:
                tensors.append(VIEWS[step.name](x, pick))
            except RuntimeError as error:
                return f"{step.name}: {type(error).__name__}"
        elif x.numel():
            try:
                WRITES[step.name](x, y, pick)
            except RuntimeError as error:
                return f"{step.name}: {type(error).__name__}: {str(error).splitlines()[0][:60]}"
        if barrier is not None and line % 3 == 2:
            barrier()
    return tensors
