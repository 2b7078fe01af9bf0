"""Which CPU kernels go wherever their indices or lengths say: each is called with some that are out of range.

The calls are those that PyTorch's operator database makes of aten, gradients included. A kernel that leaves its memory
ends the process that tries it, since the numbers are so large that nothing is there.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import resource
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import rotation
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WHOLE = (torch.int32, torch.int64)
_LARGEST = 5000
_FORMS = 12  # calls of an overload whose arguments have other dtypes, ranks or flags
_SAMPLES = 12


@dataclass(frozen=True)
class _Call:
    op: torch._ops.OpOverload
    flat: list[Any]
    spec: pytree.TreeSpec


class _Noted(TorchDispatchMode):
    """Takes notice of the calls that have tensors of whole numbers, and of none that is like another."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[Any, _Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        whole = any(t.dtype in _WHOLE and t.numel() and t.layout == torch.strided for t in tensors)
        if whole and func.namespace == "aten" and all(t.numel() < _LARGEST for t in tensors):
            forms = self.calls.setdefault(str(func), {})
            form = tuple(
                (x.dtype, x.dim()) if isinstance(x, torch.Tensor) else x if isinstance(x, (str, bool, int)) else None
                for x in flat
            )
            if form not in forms and len(forms) < _FORMS:
                forms[form] = _Call(
                    func, [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in flat], spec
                )
        return func(*args, **(kwargs or {}))


def _run(function: Callable[[], Any], leaves: Any) -> None:
    results = [x for x in pytree.tree_leaves(function()) if isinstance(x, torch.Tensor) and x.requires_grad]
    expected = [x for x in pytree.tree_leaves(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if results and expected:
        sums = [x.real.sum() if x.is_complex() else x.sum() for x in results if x.numel()]
        torch.autograd.grad(sums, expected, allow_unused=True)


def _others() -> Iterator[Callable[[], Any]]:
    """What the database lacks."""
    functional = torch.nn.functional
    table, rows, offsets = torch.randn(5, 3, requires_grad=True), torch.tensor([1, 2, 0, 2]), torch.tensor([0, 2, 3])
    yield lambda: functional.embedding(rows, table, scale_grad_by_freq=True).sum().backward()
    for mode in ("sum", "mean", "max"):
        yield lambda mode=mode: functional.embedding_bag(rows, table, offsets, mode=mode).sum().backward()  # type: ignore[misc]
        yield lambda mode=mode: functional.embedding_bag(rows, table.detach(), offsets, mode=mode)  # type: ignore[misc]
    weights = torch.ones(4, requires_grad=True)
    yield (
        lambda: functional.embedding_bag(rows, table, offsets, per_sample_weights=weights, mode="sum").sum().backward()
    )
    lengths, x = torch.tensor([6]), torch.randn(6, 1, 5, requires_grad=True)
    for given in ((lengths, torch.tensor([3])), ([6], [3])):
        yield lambda given=given: functional.ctc_loss(x.log_softmax(2), torch.tensor([[1, 2, 3]]), *given).backward()  # type: ignore[misc]
    image = torch.randn(1, 2, 6, 6, requires_grad=True)
    yield lambda: functional.fractional_max_pool2d(image, 2, 3).sum().backward()
    yield lambda: functional.fractional_max_pool3d(image[None], (1, 2, 2), (1, 3, 3)).sum().backward()
    parts = torch.tensor([2, 4])
    yield (
        lambda: (
            torch.segment_reduce(torch.randn(6, requires_grad=True), "sum", lengths=parts, unsafe=True).sum().backward()
        )
    )


@functools.cache
def calls(of: int = 1) -> dict[str, dict[Any, _Call]]:
    """Calls of each overload that takes tensors of whole numbers.

    Args:
        of: One in so many operators of the database, those whose turn it is.
    """
    noted = _Noted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in _others():
            with noted:
                other()
        for dtype in (torch.float32, torch.int64):
            for op in (op for op in op_db if rotation.is_next(op.formatted_name, of)):
                differentiates = dtype == torch.float32 and op.supports_autograd
                try:
                    samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiates))[:_SAMPLES]
                except Exception:  # not of this dtype
                    continue
                for sample in samples:
                    given = (sample.input, sample.args, sample.kwargs)
                    try:
                        with noted:
                            _run(lambda op=op, s=sample: op(s.input, *s.args, **s.kwargs), given)  # type: ignore[misc]
                    except Exception:  # some samples are refused, or have no derivative
                        continue
    return noted.calls


def _trials(noted: dict[str, dict[Any, _Call]]) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    for name, forms in noted.items():
        for call in forms.values():
            for i, x in enumerate(call.flat):
                if not isinstance(x, torch.Tensor) or x.dtype not in _WHOLE or not x.numel():
                    continue
                far = 2**40 if x.dtype == torch.int64 else 2**31 - 1
                for place in sorted({0, x.numel() // 2, x.numel() - 1}):
                    for number in (far, -far, 1_000_000, -1_000_000):
                        yield name, i, functools.partial(_try, call, i, place, number)


def _try(call: _Call, argument: int, place: int, number: int) -> None:
    flat = [x.clone() if isinstance(x, torch.Tensor) else x for x in call.flat]
    flat[argument] = flat[argument].contiguous()
    flat[argument].view(-1)[place] = number
    args, kwargs = pytree.tree_unflatten(flat, call.spec)
    call.op(*args, **kwargs)


def deaths(noted: dict[str, dict[Any, _Call]]) -> set[str]:
    """The overloads that end their process when one of these calls has an argument out of range."""
    trials = list(_trials(noted))
    reached = mmap.mmap(-1, 8)
    results: set[str] = set()
    start = 0
    while start < len(trials):
        child = os.fork()
        if child == 0:
            _try_from(trials, start, results, reached)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        start = struct.unpack("q", reached[:8])[0]
        if os.WTERMSIG(status) != signal.SIGALRM:  # a polynomial of a large degree takes its time
            results.add(trials[start][0])
        start += 1
    return results


def _try_from(
    trials: list[tuple[str, int, Callable[[], Any]]], start: int, result: set[str], reached: mmap.mmap
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for k, (name, _, trial) in enumerate(trials[start:], start):
        if name in result:
            continue
        reached[:8] = struct.pack("q", k)
        signal.alarm(2)
        with contextlib.suppress(Exception):
            trial()
    os._exit(0)
