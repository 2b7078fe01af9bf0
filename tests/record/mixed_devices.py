"""Calls whose tensors are on several devices: each raises, or gives what the CPU gives, and writes what the CPU writes.

Run as a program, it takes overloads of aten from its arguments and writes a line of JSON before each call and one after
each that went wrong, so that who reads them knows which call ended the process.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
import warnings
from typing import Any

import torch

import torch_xla  # noqa: F401  # registers the device

DEVICES = ("cpu", "xla:0", "xla:1", "meta")
_MIXES = 12  # per call that the CPU accepts
_TRIES = 40
_SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (), (3, 3), (3,), (2, 3, 4, 4), (2, 2, 3))
# What their results hold, or say of memory, is not defined.
_SKIPPED = re.compile(
    r"(new_)?empty|_?resize|.*empty_(like|affine)|record_stream|_?pin_memory|data$|_assert_async|_print"
)


def overloads() -> list[str]:
    """All overloads of aten that take a tensor, as ``aten::add.Tensor``."""
    results = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or _SKIPPED.match(name.removeprefix("aten::").split(".")[0]):
            continue
        schema = _overload(name)._schema
        if any("Tensor" in str(a.real_type) for a in schema.arguments):
            results.append(name)
    return sorted(results)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, form = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), form or "default")


def _tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = torch.tensor([rng.choice((0.25, 0.5, 1.0, 2.0)) for _ in range(count)]).reshape(shape)
    return (values if dtype.is_floating_point else values > 0.5).to(dtype)


def _argument(rng: random.Random, a: Any, shape: tuple[int, ...]) -> Any:
    """A value that an argument may have; the same type gets the likeliest values most often."""
    kind, name = str(a.real_type), a.name
    optional = kind.startswith("Optional[")
    kind = kind[9:-1] if optional else kind
    if a.has_default_value() and rng.random() < 0.9 and "Tensor" not in kind:
        return a.default_value
    if kind == "Tensor":
        if optional and rng.random() < 0.3:
            return None
        dtype = rng.choice((torch.float32,) * 5 + (torch.int64, torch.bool))
        if re.search(r"ind(ex|ices)|target|offsets|lengths", name):
            dtype = rng.choice((torch.int64,) * 4 + (torch.bool,))
        elif re.search(r"mask|condition", name):
            dtype = torch.bool
        if a.is_out:
            return _tensor(rng, rng.choice(((0,), (0,), (), shape)), dtype)
        return _tensor(rng, shape if rng.random() < 0.7 else rng.choice(_SHAPES), dtype)
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        dtype = torch.int64 if "Optional" in kind else torch.float32
        return [_tensor(rng, (2,) if "Optional" in kind else shape, dtype) for _ in range(a.N or 2)]
    if kind in ("int", "SymInt"):
        return rng.choice((0, 1, -1, 2))
    if kind.startswith("List["):
        values = {"List[int]": (1, 0, 2, 3), "List[bool]": (True, False)}.get(kind, (0.5, 1.0))
        return [rng.choice(values) for _ in range(a.N or len(shape))]
    choices: dict[str, tuple[Any, ...]] = {
        "bool": (False, True),
        "float": (0.5, 1.0),
        "number": (1, 0.5, 2),
        "str": ("sum", "mean", "none"),
        "ScalarType": (torch.float32, torch.int64),
        "MemoryFormat": (torch.contiguous_format,),
    }
    return rng.choice(choices.get(kind, (None,)))


def _walk(value: Any, visit: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return visit(value)
    if isinstance(value, (list, tuple)):
        return [_walk(v, visit) for v in value]
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    _walk(value, results.append)
    return results


def _place(arguments: list[Any], devices: tuple[str, ...]) -> list[Any]:
    """Copies of arguments, each tensor on its device."""
    order = iter(devices)
    return _walk(arguments, lambda t: t.to(next(order), copy=True))


def _call(op: torch._ops.OpOverload, arguments: list[Any]) -> Any:
    pairs = list(zip(op._schema.arguments, arguments, strict=True))
    keywords = {a.name: v for a, v in pairs if a.kwarg_only}
    return op(*(v for a, v in pairs if not a.kwarg_only), **keywords)


def _arguments(name: str, seed: int, attempt: int) -> list[Any]:
    rng = random.Random(f"{seed} {name} {attempt}")
    shape = _SHAPES[attempt % len(_SHAPES)]
    return [_argument(rng, a, shape) for a in _overload(name)._schema.arguments]


def _accepted(name: str, seed: int) -> list[int]:
    """Which attempts the CPU kernel takes, two at most, the first with few dimensions."""
    actual: list[int] = []
    for attempt in range(_TRIES):
        arguments = _arguments(name, seed, attempt)
        if len(_tensors(arguments)) < 2:
            continue
        try:
            results = _call(_overload(name), arguments)
        except Exception:
            continue
        if sum(t.numel() for t in _tensors(results)) <= 10_000:
            actual.append(attempt)
        if len(actual) == 2:
            break
    return actual


def _search(names: list[str], seed: int) -> dict[str, list[int]]:
    """Attempts that the CPU takes, by overload. Each is made in a child: a few kernels end the process, or write where
    they must not, given arguments that no one means."""
    results: dict[str, list[int]] = {}
    names = list(names)
    while names:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for name in names:
                signal.alarm(10)
                os.write(writing, (json.dumps(_accepted(name, seed)) + "\n").encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as answers:
            for line in answers:
                results[names.pop(0)] = json.loads(line)
        os.waitpid(child, 0)
        names = names[1:]  # whose kernel ended the child, if there is one
    return results


def _mixes(rng: random.Random, count: int) -> list[tuple[str, ...]]:
    """Devices for the tensors of a call: one of them elsewhere, in each place, and some by chance."""
    mixes = []
    for at, (most, other) in itertools.product(range(count), itertools.permutations(DEVICES, 2)):
        mixes.append(tuple(other if i == at else most for i in range(count)))
    mixes += [tuple(rng.choice(DEVICES) for _ in range(count)) for _ in range(8)]
    mixes = [m for m in dict.fromkeys(mixes) if len(set(m)) > 1 and any(d.startswith("xla") for d in m)]
    return rng.sample(mixes, min(_MIXES, len(mixes)))


def _same(ours: Any, theirs: Any, values: bool) -> bool:
    mine, expected = _tensors(ours), _tensors(theirs)
    if [(t.shape, t.dtype) for t in mine] != [(t.shape, t.dtype) for t in expected]:
        return False
    pairs = [(_plain(a), _plain(b)) for a, b in zip(mine, expected, strict=True) if not (a.is_meta or b.is_meta)]
    return not values or all(torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in pairs)


def _plain(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu()
    t = t.dequantize() if t.is_quantized else t
    return t if t.layout == torch.strided else t.to_dense()


def _wrong(op: torch._ops.OpOverload, arguments: list[Any], devices: tuple[str, ...]) -> str | None:
    """What is wrong with a call, if anything."""
    given = _place(arguments, devices)
    plain = _place(arguments, tuple("meta" if d == "meta" else "cpu" for d in devices))
    try:
        got = _call(op, given)
    except Exception as error:
        return str(error)[:200] if isinstance(error, SystemError) or "INTERNAL ASSERT" in str(error) else None
    try:
        want = _call(op, plain)
    except Exception as error:
        return f"no error, on CPU: {str(error)[:100]}"
    values = torch.Tag.nondeterministic_seeded not in op.tags
    if "meta" in devices:  # PyTorch's kernels of meta tensors look at no device, and leave what they write undefined
        return None if _same(given, plain, False) else "an argument has not the shape that it has on CPU"
    if _same([given, got], [plain, want], values):
        return None
    alone = _place(arguments, ("xla:0",) * len(devices))
    if not _same([_call(op, alone), alone], [want, plain], values):
        return None  # a difference between the devices, not of having both
    return "a result or an argument is not what it is on CPU"


def main() -> None:
    """Tries overloads: ``SEED NAME…``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed = int(sys.argv[1])
    for name, attempts in _search(sys.argv[2:], seed).items():
        for attempt in attempts:
            arguments = _arguments(name, seed, attempt)
            shapes = [tuple(t.shape) for t in _tensors(arguments)]
            for devices in _mixes(random.Random(f"{seed} {name} {attempt}"), len(shapes)):
                call = {"name": name, "devices": devices, "shapes": shapes}
                print(json.dumps(call), flush=True)
                try:
                    wrong = _wrong(_overload(name), arguments, devices)
                except Exception as error:
                    wrong = f"its values cannot be compared: {error}"[:200]
                if wrong is not None:
                    print(json.dumps({**call, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
