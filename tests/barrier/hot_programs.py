"""Random programs of changing shapes, views, writes, branches on values and reads, to be run on two devices."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_xla

Make = Callable[[random.Random, Tensor], Tensor]
DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16)
_LARGEST = 400  # elements of what a program goes on with


def _dim(draw: random.Random, x: Tensor) -> int:
    return draw.randrange(x.dim())


def _slice(draw: random.Random, x: Tensor) -> Tensor:
    dim = _dim(draw, x)
    start, step = draw.randrange(x.shape[dim] + 1), draw.randint(1, 3)
    return x[(slice(None),) * dim + (slice(start, None, step),)]


def _unfold(draw: random.Random, x: Tensor) -> Tensor:
    dim = _dim(draw, x)
    size = draw.randint(0, min(x.shape[dim], 3))
    return x.unfold(dim, size, draw.randint(1, 3))


def _strided(draw: random.Random, x: Tensor) -> Tensor:
    room = x.numel()
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    strides = [draw.randint(0, 5) for _ in sizes]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not x.is_contiguous() or last >= room:
        return x
    return x.as_strided(sizes, strides, x.storage_offset() + draw.randrange(room - last))


def _index(draw: random.Random, x: Tensor, length: int) -> Tensor:
    size = x.shape[0]
    return torch.tensor([draw.randrange(-size, size) for _ in range(length)], dtype=torch.int64).to(x.device)


VIEWS: list[Make] = [
    lambda draw, x: x.transpose(_dim(draw, x), _dim(draw, x)),
    lambda draw, x: x.permute(*draw.sample(range(x.dim()), x.dim())),
    _slice,
    _slice,
    _unfold,
    _strided,
    lambda draw, x: x.select(dim := _dim(draw, x), draw.randrange(x.shape[dim])) if x.shape[0] and all(x.shape) else x,
    lambda draw, x: x.unsqueeze(draw.randrange(x.dim() + 1)),
    lambda draw, x: x.squeeze(),
    lambda draw, x: x.diagonal(draw.randint(-1, 1)) if x.dim() > 1 else x,
    lambda draw, x: x.expand(draw.randint(1, 3), *x.shape),
    lambda draw, x: x.flatten(),
    lambda draw, x: x.reshape(-1, 2) if x.numel() and x.numel() % 2 == 0 else x,
    lambda draw, x: x.chunk(2, _dim(draw, x))[-1],
    lambda draw, x: x.movedim(0, -1),
    lambda draw, x: x.view(torch.int32) if x.dtype == torch.float32 and x.is_contiguous() else x,
    lambda draw, x: x.detach(),
]


def _softmax(draw: random.Random, x: Tensor) -> Tensor:
    return x.float().softmax(_dim(draw, x))


NEW: list[Make] = [
    lambda draw, x: x * draw.choice([2, -1, 3]),
    lambda draw, x: x + draw.randint(-3, 3),
    lambda draw, x: x / draw.choice([3, 7]),
    lambda draw, x: torch.where(x > 0, x, draw.randint(-2, 2)),
    lambda draw, x: x.float().sin(),
    lambda draw, x: x.float().tanh().to(torch.bfloat16),
    lambda draw, x: x.double().cos(),
    lambda draw, x: (x.float().tanh() * 50).round().to(torch.int64),
    lambda draw, x: x.flip(_dim(draw, x)),
    lambda draw, x: x.roll(draw.randint(-3, 3), _dim(draw, x)),
    lambda draw, x: torch.cat([x, x[:1]], 0),
    lambda draw, x: x.clone(),
    lambda draw, x: x.contiguous(),
    lambda draw, x: x.sum(_dim(draw, x), keepdim=draw.random() < 0.5),
    lambda draw, x: x.amax(dim, keepdim=True) if x.shape[dim := _dim(draw, x)] else x,
    lambda draw, x: x.cumsum(_dim(draw, x)),
    lambda draw, x: x.sort(dim=_dim(draw, x), stable=True).indices if x.dtype == torch.int64 else x.clone(),
    lambda draw, x: x[_index(draw, x, draw.randint(0, 4))] if x.shape[0] else x,
    lambda draw, x: x.index_select(0, _index(draw, x, 3) % x.shape[0]) if x.shape[0] else x,
    lambda draw, x: x.repeat_interleave(2, _dim(draw, x)),
    lambda draw, x: F.pad(x, (1, 2)),
    lambda draw, x: x.tril() if x.dim() > 1 else x,
    lambda draw, x: x @ x.mT if x.dim() == 2 and x.dtype != torch.bfloat16 else x,
    lambda draw, x: F.layer_norm(x.float(), x.shape[-1:]) if x.shape[-1] > 1 else x,
    _softmax,
    lambda draw, x: x.float().mean(_dim(draw, x), keepdim=True).nan_to_num(),
    lambda draw, x: F.one_hot(x.long().remainder(5), 5),
    lambda draw, x: (x > x.flip(0)).to(x.dtype),
    lambda draw, x: (
        x.to(draw.choice([torch.float32, torch.int64])) if x.is_floating_point() is False else x.half().float()
    ),
    lambda draw, x: F.avg_pool1d(x.float().reshape(1, 1, -1), 2) if x.numel() > 2 else x,
    lambda draw, x: torch.stack([x, x.neg()], draw.randrange(x.dim() + 1)),
]


def _written(draw: random.Random, x: Tensor) -> Tensor:
    """A part of it, which does not repeat elements."""
    for _ in range(draw.randint(0, 2)):
        part = draw.choice([VIEWS[0], _slice, VIEWS[6], VIEWS[7], VIEWS[13]])(draw, x)
        x = part if part.dim() else x
    return x


def _write(draw: random.Random, x: Tensor, other: Tensor) -> None:
    way = draw.randrange(9)
    if way == 0:
        x.add_(draw.randint(-2, 2))
    elif way == 1:
        x.mul_(draw.choice([-1, 2]))
    elif way == 2:
        x.fill_(draw.randint(-2, 2))
    elif way == 3:
        x.masked_fill_(x > 1, draw.randint(-2, 2))
    elif way == 4:
        x.clamp_(-20, 20)
    elif way == 5 and other.numel():
        x.copy_(other.flatten()[:1].clone().expand(x.shape))
    elif way == 6 and x.shape[0]:
        x[_index(draw, x, 1)] = draw.randint(-2, 2)
    elif way == 7:
        x[x < 0] = 3
    elif x.shape[0]:
        x.index_add_(0, _index(draw, x, 2) % x.shape[0], torch.ones_like(x[:1]).repeat_interleave(2, 0))


DRAWN: list[Callable[[Tensor], Tensor]] = [
    torch.rand_like,
    torch.randn_like,
    lambda x: F.dropout(x, 0.4),
    lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    lambda x: torch.empty_like(x).uniform_(-1, 2),
    lambda x: torch.randint_like(x, 9),
    lambda x: x.flatten()[torch.randperm(x.numel(), device=x.device)] if x.numel() else x,
]


def _is_written_once(x: Tensor) -> bool:
    """Whether it has elements, no two of which are the same."""
    repeated = any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.numel() > 0 and not repeated and not torch._debug_has_internal_overlap(x)


def _bounded(x: Tensor) -> Tensor:
    """What a program goes on with: neither too large nor far from 0, so that rounding stays what it was."""
    x = x.reshape(1) if not x.dim() else x
    x = x.flatten()[:_LARGEST].clone() if x.numel() > _LARGEST or x.dim() > 4 else x
    return x.to(torch.int64) if x.dtype == torch.bool else x


def run(
    device: str, seed: int, *, turns: int, drawing: bool = False, barrier: Callable[[], None] | None = None
) -> list[Tensor]:
    """Runs a program; gives all that it read, and its state at its end.

    Args:
        device: Where.
        seed: Which program.
        turns: How often its body runs. With more than one some graphs repeat, and are compiled.
        drawing: Whether it draws random numbers, which are not the CPU's.
        barrier: What is called for a barrier, on the CPU too; its programs have no 16-bit values, which change too much
            when a graph is compiled.
    """
    draw = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    if device != "cpu":
        torch_xla.manual_seed(seed)
    state = []
    for _ in range(3):
        sizes = [draw.randint(0, 5) if draw.random() < 0.1 else draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        dtype = draw.choice(DTYPES)
        dtype = torch.int64 if barrier is not None and dtype == torch.bfloat16 else dtype
        state.append(torch.randint(-9, 9, sizes, generator=numbers).to(dtype).to(device))
    read: list[Tensor] = []
    body = draw.getrandbits(64)
    for turn in range(turns):
        draw = random.Random(body if draw.random() < 0.7 else body + turn)
        for _ in range(draw.randint(3, 12)):
            at = draw.randrange(len(state))
            x, way = state[at], draw.random()
            if way < 0.25:
                x = draw.choice(VIEWS)(draw, x)
                x = x if x.dim() else x.reshape(1)
                state[at] = x if x.numel() <= _LARGEST and x.dim() < 5 else _bounded(x)
            elif way < 0.6:
                state[at] = _bounded(draw.choice(NEW)(draw, x))
            elif way < 0.75:
                part = _written(draw, x)
                if _is_written_once(part):
                    _write(draw, part, state[draw.randrange(len(state))])
            elif way < 0.8 and drawing:
                state[at] = _bounded(draw.choice(DRAWN)(x.float()))
            elif way < 0.86 and x.dtype == torch.int64 and not drawing:
                if (x.sum() % 2 == 0).item():
                    state[at] = x + 1
            elif way < 0.93:
                read.append(x.detach().cpu().clone())
            elif barrier is None and device != "cpu":
                torch_xla.sync()
            if barrier is not None and draw.random() < 0.2:
                barrier()
            if barrier is not None and state[at].dtype == torch.bfloat16:
                state[at] = state[at].float()
        state = [x.float().clamp(-50, 50).to(x.dtype) if x.is_floating_point() else x.clamp(-99, 99) for x in state]
    return [*read, *(x.detach().cpu().clone() for x in state)]
