"""Arguments for any overload of aten, made from its schema: by trial on the CPU, sets that its kernel accepts and sets
that it refuses."""

from __future__ import annotations

import functools
import itertools
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

Call = dict[str, Any]  # argument name to a value; tensors as `Spec`


@dataclass(frozen=True)
class Spec:
    """A tensor of an argument set.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        fill: ``normal``, ``unit`` (between 0 and 1), ``matrix`` (symmetric, positive definite), ``index`` (0 and 1),
            ``rising`` (0, 1, 2, …) or ``ones``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: str = "normal"

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}:{self.fill}"

    def make(self, seed: int) -> torch.Tensor:
        """The tensor, on the CPU; the same one for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.fill == "unit":
            values = torch.rand(self.shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05
        elif self.fill == "matrix" and len(self.shape) > 1 and self.shape[-1] == self.shape[-2]:
            values = values @ values.mT + torch.eye(self.shape[-1], dtype=torch.float64)
        elif self.fill == "index":
            values = torch.arange(values.numel(), dtype=torch.float64).reshape(self.shape) % 2
        elif self.fill == "rising":
            values = torch.arange(values.numel(), dtype=torch.float64).reshape(self.shape)
        elif self.fill == "ones":
            values = torch.ones(self.shape, dtype=torch.float64)
        if self.dtype.is_complex:
            other = torch.randn(self.shape, generator=generator, dtype=torch.float64)
            return torch.complex(values, other if self.fill == "normal" else other * 0).to(self.dtype)
        if self.dtype == torch.bool:
            return values > 0.2
        if not self.dtype.is_floating_point and self.fill in ("normal", "unit"):
            values = (values * 3).round()
            values = values.abs() if self.dtype == torch.uint8 else values
        return values.to(self.dtype)


class Generator:
    """Stands for a generator of the device."""

    def __repr__(self) -> str:
        return "generator"


GENERATOR = Generator()


F32, F64, I64, BOOL, C64 = torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64
_DTYPES = (F32, I64, BOOL, C64)
_OTHER_DTYPES = (F64, torch.int32, torch.uint8, torch.bfloat16)
_SHAPES = ((2, 3), (3, 3), (3,), (), (1, 2, 4, 4), (2, 2, 4), (1, 2, 4, 4, 4), (2, 3, 3), (0, 3), (2, 4, 4))

_INDEX = r"ind(ex|ices)$|.*ind(ex|ices)$|offsets?|targets?|batch_sizes|.*lengths?|pivots|LU_pivots|sorter|repeats" \
         r"|offset2bag|bag_size|maximum_indices|cu_seqlens.*|max_indices|batches|sections.*"  # fmt: skip
_MASK = r".*mask|condition|cond|found|predicate"
_WEIGHT = r"weight|bias|running_.*|save_.*|mean|rstd|invstd|scale|zero_point|gamma|beta|result\d|reserve"
_SMALL = r"lr|found_inf|grad_scale|end|start|scale|zero_point|step|value|total_weight|norm"

_ON = r"train|training|use_input_stats|has_biases"

_STRINGS = {
    "reduce": ("sum", "mean", "prod", "amax", "amin", "max"),
    "interpolation": ("linear", "lower", "higher", "midpoint", "nearest"),
    "UPLO": ("L", "U"),
    "approximate": ("none", "tanh"),
    "ord": ("fro", "nuc"),
    "p": ("fro", "nuc"),
    "padding": ("same", "valid"),
    "mode": ("reflect", "constant", "reduced", "complete", "replicate", "circular"),
    "pad_mode": ("reflect", "constant"),
    "equation": ("ij->ji", "ij,kj->ik", "ij,ij->ij", "...i->..."),
    "indexing": ("ij", "xy"),
    "norm": ("ortho", "forward", "backward"),
    "rounding_mode": ("trunc", "floor"),
    "driver": ("gelsd", "gelsy", "gels", "gelss", "gesvd"),
    "side": ("left", "right"),
    "padding_side": ("right", "left"),
    "activation": ("relu", "gelu"),
    "assert_msg": ("said",),
}

_INTEGERS = (
    (r"dim\d?|axis\d?|dimension|batch_dim|index_dim|start_dim|end_dim", (0, 1, -1, -2, 2)),
    (r"groups", (1, 2)),
    (r"reduction", (1, 0, 2)),
    (r"num_layers|blank|padding_idx|offset|storage_offset", (0, 1, -1, 2)),
    (r"interpolation_mode|padding_mode|mode", (0, 1, 2)),
    (r"quant_min|zero_point", (0, 1)),
    (r"quant_max", (255, 127)),
    (r"high|steps|n|k|m|window_length|N|bins|hidden_size|num_weights|end|n_fft|size|chunks|sections", (3, 1, 4, 2, 0)),
    (r"group", (1, 2)),
)


_OPTIONS = ("memory_format", "dtype", "layout", "device", "pin_memory")


class Arguments:
    """The schema of an overload, and values for each of its arguments."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        self.op = op
        self.arguments = op._schema.arguments

    def choices(self, argument: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
        """Values that an argument may have, where tensors are mostly of this shape and dtype; the likely ones first."""
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        kind = kind[9:-1] if optional else kind
        name = argument.name
        values: list[Any] = []
        if kind == "Tensor":
            values = list(self._tensors(name, shape, dtype))
        elif kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            one = list(self._tensors(name, shape, dtype))
            values = [[t, replace(t)] for t in one[:4]] + [[one[0]], [one[0]] * 3, []]
            if "Optional" in kind:
                index = Spec(I64, (2,), "index")
                values = [[index], [None, index], [Spec(BOOL, shape)], [index, index], *values]
            if argument.N:
                values = [[t] * argument.N for t in one] + values
        elif kind == "List[int]":
            values = self._lists(name, argument.N, shape)
        elif kind == "List[bool]":
            n = argument.N or 2
            values = [[True] * n, [True] + [False] * (n - 1), [False] * (n - 1) + [True], [False] * n]
        elif kind in ("List[float]", "List[number]"):
            n = argument.N or max(1, len(shape) - 2)
            values = [[2.0] * n, [0.5] * 2, [1.0, 2.0], [3], [1, 2], [0.0, 1.0] * 2, []]
        elif kind in ("int", "SymInt"):
            fitting = (v for pattern, v in _INTEGERS if re.fullmatch(pattern, name))
            values = list(next(fitting, (1, 0, 2, -1, 3, 4)))
        elif name == "pin_memory":
            values = [False]
        elif kind == "bool":
            values = [True, False] if re.fullmatch(_ON, name) else [False, True]
        elif kind == "float":
            values = [0.0, 0.5, 1.0, 2.0, -1.0] if "dropout" in name else [0.5, 1.0, 0.0, 1e-5, 2.0, -1.0]
            values = [2.0, 0.5] if name.startswith("scales") else values
        elif kind == "number":
            values = [1, 0.5, 2, 0, -1, True, 1j, 2.5, 3]
        elif kind == "str":
            values = [*_STRINGS.get(name, ("sum", "mean", "none")), "strange"]
        elif kind == "ScalarType":
            values = [F32, I64, F64, BOOL, C64, torch.bfloat16, torch.int32]
        elif kind == "Layout":
            values = [torch.strided]
        elif kind == "MemoryFormat":
            values = [torch.contiguous_format, torch.preserve_format, torch.channels_last]
        elif kind == "Device":
            values = [torch.device("cpu")]
        elif kind == "Generator":
            values = [GENERATOR]
        else:
            raise TypeError(f"no values of type {kind}")
        if argument.has_default_value():
            default = argument.default_value
            if kind == "ScalarType" and isinstance(default, int):
                default = values[0]
            known = [v for v in values if v == default and type(v) is type(default)]
            values = [default] + [v for v in values if not (known and v == default and type(v) is type(default))]
        elif optional:
            values = [None, *values]
        return values

    def _tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Spec]:
        rank = len(shape)
        channels = shape[1] if rank > 1 else shape[0] if rank else 2
        last = shape[-1:] or (2,)
        around: list[tuple[int, ...]] = [
            shape,
            last,
            (channels,),
            (),
            shape[::-1],
            shape[:-1],
            (*shape, 2),
            shape[:1],
            (0,),
        ]
        if rank > 2:
            spatial = rank - 2
            around[1:1] = [(channels, channels, *(3,) * spatial), (channels, channels, *(1,) * spatial)]
            around += [(*shape[:2], *(2,) * spatial), (*shape[:2], *(s * 2 for s in shape[2:])), (*shape[:-1], 2)]
        if rank > 1:
            around.append((1,) * rank)
        if re.fullmatch(_INDEX, name):
            for s in (shape, *around[1:]):
                yield Spec(I64, s, "index")
            yield Spec(I64, last, "rising")
            yield Spec(I64, (2,), "rising")
            yield Spec(torch.int32, last, "rising")
            yield Spec(torch.int32, last, "ones")
        if re.fullmatch(_MASK, name):
            yield from (Spec(BOOL, s) for s in around[:4])
        if re.fullmatch(_SMALL, name):
            yield Spec(F32, (), "ones")
        if re.fullmatch(_WEIGHT, name):
            for s in ((channels,), last, *around[1:3]):
                yield Spec(dtype, s, "unit")
        for s in dict.fromkeys(around):
            yield Spec(dtype, s)
        yield Spec(dtype, shape, "unit")
        yield Spec(dtype, shape, "matrix")
        yield Spec(dtype, shape, "rising")
        for other in (*_DTYPES, *_OTHER_DTYPES):
            if other != dtype:
                yield Spec(other, shape, "index" if other == I64 else "normal")
        yield Spec(I64, last, "index")

    def _lists(self, name: str, n: int | None, shape: tuple[int, ...]) -> list[Any]:
        rank = len(shape)
        spatial = max(rank - 2, 1)
        fill = {"padding": (0, 1, 2), "output_padding": (0, 1), "kernel_size": (2, 3, 1), "output_size": (2, 3, 1)}
        repeated = [[v] * k for v in fill.get(name, (1, 2, 0, 3)) for k in dict.fromkeys((spatial, n or spatial, 2, 1))]
        whole: list[Any] = [list(shape), list(shape[1:]), list(shape[-1:]), list(shape[::-1]), [-1]]
        dims: list[Any] = [[0], [-1], [1], [0, 1], [1, 0], list(range(rank))[::-1], []]
        if re.match(r"(input_|self_)?sizes?$|shape|normalized_shape", name):
            return [*whole, [2, 3], *repeated, []]
        if re.match(r"dims?$|dims_|source|destination|shifts|permutation", name):
            return [*dims, *whole]
        return [*repeated, *whole, *dims]

    def level(self, call: Call) -> Call:
        """The call with all its lists of tensors as long as the first: fused kernels do not look, and read beside."""
        lists = [a.name for a in self.arguments if str(a.real_type) == "List[Tensor]" and call[a.name] is not None]
        if len(lists) < 2:
            return call
        length = len(call[lists[0]])
        return {**call, **{n: (call[n] * length or [Spec(F32, (2, 3))] * length)[:length] for n in lists[1:]}}

    def fixed(self, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
        """The likeliest value of each argument."""
        return {a.name: self.choices(a, shape, dtype)[0] for a in self.arguments}

    def drawn(self, rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
        """Values chosen by chance, the likely ones more often."""
        call = {}
        for a in self.arguments:
            values = self.choices(a, shape, dtype)
            likely = 0.85 if a.has_default_value() else 0.45
            call[a.name] = values[0] if rng.random() < likely else rng.choice(values)
        return call


@functools.cache
def names() -> tuple[str, ...]:
    """All overloads of aten, as ``aten.add.Tensor``."""
    result = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    return tuple(sorted(n.replace("::", ".") + ("" if "." in n else ".default") for n in result))


def overload(name: str) -> torch._ops.OpOverload:
    """The overload of a name."""
    _, packet, form = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), form)


def written(op: torch._ops.OpOverload) -> list[str]:
    """The arguments that an overload writes."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that takes the same arguments and writes none, of an overload that writes."""
    if not written(op):
        return None
    base = op._schema.name.removeprefix("aten::")
    expected = [a.name for a in op._schema.arguments if not a.is_out]
    for packet_name in dict.fromkeys((base.rstrip("_"), base)):
        packet = getattr(torch.ops.aten, packet_name, None)
        for form in packet.overloads() if packet is not None else ():
            other = getattr(packet, form)
            have = [a.name for a in other._schema.arguments]
            plain = [name for name in have if name not in _OPTIONS]
            if not written(other) and expected in (have, plain):
                types = {a.name: str(a.real_type) for a in op._schema.arguments}
                if all(types.get(a.name, "") == str(a.real_type) for a in other._schema.arguments if a.name in types):
                    return other
    return None


def make(call: Call, name: str) -> Call:
    """A call's arguments, on the CPU."""
    seed = zlib.crc32(name.encode())
    count = itertools.count(seed)

    def walk(v: Any) -> Any:
        if isinstance(v, Spec):
            return v.make(next(count))
        if isinstance(v, Generator):
            return torch.Generator().manual_seed(5)
        return [walk(e) for e in v] if isinstance(v, list) else v

    return {k: walk(v) for k, v in call.items()}


def invoke(op: torch._ops.OpOverload, call: Call) -> Any:
    """Calls an overload with arguments by name."""
    positional = [call[a.name] for a in op._schema.arguments if not a.kwarg_only]
    keywords = {a.name: call[a.name] for a in op._schema.arguments if a.kwarg_only}
    return op(*positional, **keywords)
