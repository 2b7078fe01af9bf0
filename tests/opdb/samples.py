"""The inputs of a job: a fixed choice of the operator database's samples, and copies of them on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_map_only

from opdb.cases import DTYPES, Job, has_gradient, operators
from torch_xla._core.device import described

# How many samples a job checks. Those with a new trait (zero-size, 0-d, broadcast, …) come first.
_CAP = {"forward": 8, "gradient": 3, "inplace": 4, "out": 3, "platform": 3}
_LARGEST = 20_000  # elements; larger samples test nothing more
_LOOKED_AT = 300

# Operators whose integer tensors stay on the host: they are read where the call is made, on every device.
_HOST_INTEGERS = ("tensor_split",)

# Operators that refuse, or leave undefined, what lies between the elements.
_NO_TWIN = ("as_strided_scatter",)


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        args: Positional arguments, on the CPU.
        kwargs: Keyword arguments.
        process: Turns the results into what is defined uniquely, such as the absolute value of eigenvectors.
        text: What the call looks like.
        twin: Whether the sweep made it from another one, with gaps between elements.
        host_integers: Whether integer tensors after the first argument stay on the host.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    text: str
    twin: bool = False
    host_integers: bool = False

    def arguments(self, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of the arguments on a device."""
        first = copy(self.args[:1], device)
        return first + copy(self.args[1:], device, self.host_integers), copy(self.kwargs, device, self.host_integers)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_of(element)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def choose(job: Job) -> list[Sample]:
    """The samples of a job other than an ``error`` one; the same ones in every process."""
    info = operators()[job.op]
    torch.manual_seed(0)
    differentiated = job.kind == "gradient" or job.kind == "platform" and has_gradient(info, job.dtype)
    pool = info.sample_inputs("cpu", DTYPES[job.dtype], requires_grad=differentiated)
    cap = 1 if job.kind == "platform" and described.topology() is not None else _CAP[job.kind]
    fitting = [s for s in itertools.islice(pool, _LOOKED_AT) if _size(s) <= _LARGEST]
    chosen = [fitting[i] for i in _pick([_traits(s) for s in fitting], cap)]
    result = [_sample(job.op, s) for s in chosen]
    if job.kind in ("forward", "gradient") and job.op not in _NO_TWIN:
        # The database has few samples with gaps between elements: one more, made from the first that can have them.
        spread = next((s for s in chosen if any(t.numel() > 1 and _dense(t) for t in _tensors(s))), None)
        if spread is not None:
            result.append(replace(_sample(job.op, spread.noncontiguous()), twin=True))
    return result


def error_samples(job: Job) -> list[Sample]:
    """The calls that PyTorch must refuse."""
    torch.manual_seed(0)
    return [_sample(job.op, e.sample_input) for e in operators()[job.op].error_inputs("cpu")]


def _sample(op: str, s: SampleInput) -> Sample:
    text = str(s.summary()).removeprefix("SampleInput").replace(', device="cpu"', "")
    return Sample(
        (s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad, text, host_integers=op in _HOST_INTEGERS
    )


def _tensors(s: SampleInput) -> list[torch.Tensor]:
    return list(tensors_of((s.input, s.args, s.kwargs)))


def _dense(t: torch.Tensor) -> bool:
    return t.layout == torch.strided


def _size(s: SampleInput) -> int:
    return sum(t.numel() for t in _tensors(s))


def _traits(s: SampleInput) -> set[Any]:
    tensors = _tensors(s)
    traits: set[Any] = {("tensors", len(tensors)), ("broadcast", s.broadcasts_input)}
    for name, value in s.kwargs.items():
        traits.add((name, value if isinstance(value, (bool, str)) else type(value)))
    traits.update(("type", i, type(a)) for i, a in enumerate(s.args))
    for i, t in enumerate(tensors):
        traits |= {("dims", i, t.dim()), ("empty", t.numel() == 0), ("dtype", i, t.dtype), ("layout", t.layout)}
        if _dense(t):
            traits.add(("contiguous", t.is_contiguous()))
    if len({t.shape for t in tensors}) > 1:
        traits.add("shapes differ")
    return traits


def _pick(traits: list[set[Any]], cap: int) -> list[int]:
    """Greedy cover: each time the sample with the most traits not seen yet, the earlier one of equals."""
    left = list(range(len(traits)))
    seen: set[Any] = set()
    picked: list[int] = []
    while left and len(picked) < cap:
        best = max(left, key=lambda i: (len(traits[i] - seen), -i))
        if not traits[best] - seen:
            # Nothing new: spread what remains over the whole list.
            step = max(1, len(left) // (cap - len(picked)))
            picked += left[::step][: cap - len(picked)]
            break
        seen |= traits[best]
        left.remove(best)
        picked.append(best)
    return sorted(picked)


def copy(value: Any, device: str, host_integers: bool = False) -> Any:
    """A copy of nested arguments on a device; strides, offsets, lazy conjugation and repeated tensors stay.

    Args:
        value: Tensors, tuples, lists, dicts, slices, anything else. The text ``"cpu"`` becomes the device.
        device: ``"cpu"`` or ``"xla"``.
        host_integers: Leave integer tensors on the CPU.
    """
    made: dict[int, torch.Tensor] = {}

    def walk(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in made:
                stays = host_integers and x.dtype == torch.int64
                made[id(x)] = _copy_tensor(x, "cpu" if stays else device)
            return made[id(x)]
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(walk, x))
        if isinstance(x, (list, tuple)):
            return type(x)(map(walk, x))
        if isinstance(x, dict):
            return {k: walk(v) for k, v in x.items()}
        if isinstance(x, slice):
            return slice(walk(x.start), walk(x.stop), walk(x.step))
        return torch.device(device) if x == "cpu" or isinstance(x, torch.device) else x

    return walk(value)


def cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Nested values whose tensors of one dtype have another."""
    return tree_map_only(torch.Tensor, lambda t: t.to(new) if t.dtype == old else t, value)


def _copy_tensor(t: torch.Tensor, device: str) -> torch.Tensor:
    plain = t.detach()
    if plain.is_meta:
        return plain
    if not _dense(plain):
        return plain.clone().to(device).requires_grad_(t.requires_grad)
    conjugate, negative = plain.is_conj(), plain.is_neg()
    if conjugate:
        plain = plain.conj()
    if negative:
        plain = plain._neg_view()
    if plain.is_contiguous() and not plain.storage_offset():
        result = plain.clone().to(device)
    else:
        memory = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage()).clone().to(device)
        result = memory.as_strided(plain.size(), plain.stride(), plain.storage_offset())
    if negative:
        result = result._neg_view()
    if conjugate:
        result = result.conj()
    return result.detach().requires_grad_(t.requires_grad)
