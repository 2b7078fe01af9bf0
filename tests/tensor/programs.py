"""Random programs of views, in-place writes and reads, as hypothesis makes them; the same text runs on any device."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

Pick = Callable[[int], int]  # pick(n) is a number below n


def _dim(x: Tensor, pick: Pick) -> int:
    return pick(x.dim())


def _covering(x: Tensor) -> Tensor:
    """What it is a view of: PyTorch has no gradient for memory that a view reaches beyond the one it is made from."""
    return x._base if x._base is not None else x


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
    "as_strided": lambda x, pick: _covering(x).as_strided((1 + pick(2), 1 + pick(2)), (2, 1), pick(3)),
    "new": lambda x, pick: x * 2 + 1,
    "clone": lambda x, pick: x.clone(),
    "contiguous": lambda x, pick: x.contiguous(),
}


def _places(x: Tensor) -> set[int]:
    """Where in memory its elements are."""
    places = {x.storage_offset()}
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = {place + i * stride for place in places for i in range(size if stride else 1)}
    return places


def _undefined(x: Tensor, y: Tensor | None) -> bool:
    """Whether PyTorch leaves open what becomes of `x` if it is written, `y` being read."""
    if len(_places(x)) < math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride):
        return True  # other repeated elements than those of `expand` are not refused
    if y is None or x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    dense = all(torch.ops.aten.is_non_overlapping_and_dense.default(t) for t in (x, y))
    same = x.shape == y.shape and x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
    return not dense and not same and not _places(x).isdisjoint(_places(y))  # PyTorch looks at dense ones only


def _out(x: Tensor, y: Tensor) -> None:
    resized_over_what_is_read = x.shape != y.shape and x.untyped_storage()._cdata == y.untyped_storage()._cdata
    if not resized_over_what_is_read and not _undefined(y, x):
        torch.mul(x, 2, out=y)


WRITES: dict[str, Callable[[Tensor, Tensor, Pick], object]] = {
    "add_": lambda x, y, pick: x.add_(pick(5)),
    "mul_": lambda x, y, pick: x.mul_(0.5),
    "add_other": lambda x, y, pick: x.add_(y.sum() * 0.125),
    "fill_": lambda x, y, pick: x.fill_(float(pick(9))),
    "zero_": lambda x, y, pick: x.zero_(),
    "copy_": lambda x, y, pick: x.copy_(x.flip(0) if x.dim() else x + 1),
    "set_first": lambda x, y, pick: x.__setitem__(0, float(pick(9))) if x.dim() else x.add_(1),
    "masked_fill_": lambda x, y, pick: x.masked_fill_(x > 4, -1.0),
    "masked": lambda x, y, pick: x.__setitem__(x > 4, float(pick(9))),
    "index_fill_": lambda x, y, pick: x.index_fill_(0, torch.tensor([0], device=x.device), 2.0) if x.dim() else None,
    "out": lambda x, y, pick: torch.add(x, 1, out=x),
    "out_other": lambda x, y, pick: _out(x, y),
    "clamp_": lambda x, y, pick: x.clamp_(-3, 3),
    "add_tensor": lambda x, y, pick: None if _undefined(x, y) else x.add_(y),
    "copy_other": lambda x, y, pick: None if _undefined(x, y) else x.copy_(y),
    "data_": lambda x, y, pick: x.data.add_(1),
    "detach_": lambda x, y, pick: x.detach().mul_(2),
    "no_grad": lambda x, y, pick: torch.no_grad()(x.mul_)(2),
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
    name=st.sampled_from([*VIEWS, *WRITES, "read", "barrier", "drop"]),
    on=st.integers(0, 1000),
    other=st.integers(0, 1000),
    picks=st.tuples(*[st.integers(0, 1000)] * 4),
)
programs = st.lists(steps, min_size=1, max_size=14)


def _told(error: RuntimeError) -> str:
    """Type and beginning of a message, which may name an inner operator of `reshape` that depends on the device."""
    text = re.sub(r"^Output \d+ of \w+", "Output", str(error).splitlines()[0])
    return f"{type(error).__name__}: {text[:60]}"


def run(program: list[Step], device: str, barrier: Callable[[], object]) -> list[Tensor] | str:
    """All tensors of the program at its end and the gradient of the one it started from, or what ended it.

    Args:
        program: The steps. A read computes what it reads, and so cuts the graph in the middle of the program.
        device: Where the tensors live.
        barrier: Called where the program has one.
    """
    leaf = torch.arange(24.0, device=device).reshape(4, 6).requires_grad_()
    tensors = [torch.arange(24.0, device=device).reshape(4, 6), leaf * 1]
    for step in program:
        picks = iter(step.picks)

        def pick(n: int, picks: object = picks) -> int:
            return next(picks) % n if n > 0 else 0  # type: ignore[call-overload]

        x = tensors[step.on % len(tensors)]
        y = tensors[step.other % len(tensors)]
        try:
            if step.name == "barrier":
                barrier()
            elif step.name == "drop":
                tensors = [t for t in tensors if t is not x] or tensors
            elif step.name == "read":
                x.detach().tolist()  # it is no use of the gradient's history, which would be checked on xla alone
            elif step.name in VIEWS:
                if x.numel() and (x.dim() or step.name in ("unsqueeze", "new", "clone")):
                    tensors.append(VIEWS[step.name](x, pick))
            elif x.numel() and (step.name in ("fill_", "zero_", "out_other") or not _undefined(x, None)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of writes to expanded tensors, and of resized out= tensors
                    WRITES[step.name](x, y, pick)
        except RuntimeError as error:
            return f"{step.name}: {_told(error)}"
    try:
        total = sum((t * t).sum() for t in tensors if t.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
    except RuntimeError as error:
        return f"backward: {_told(error)}"
    return tensors if leaf.grad is None else [*tensors, leaf.grad]
