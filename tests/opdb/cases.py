"""Which jobs there are: operators × dtypes × kinds, and the family each operator belongs to."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import rotation
import torch

from torch_xla._core.device import described

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}

# Kinds other than the forward values are checked for these dtypes.
_KIND_DTYPES = {
    "forward": tuple(DTYPES)[:-1],
    "gradient": ("float32", "float64", "bfloat16", "float16"),
    "inplace": ("float32", "float64"),
    "out": ("float32", "float64"),
    "error": ("float32",),  # `error_inputs` chooses dtypes by itself
    "platform": (
        "float32",
        "float64",
        "complex64",
        "complex128",
    ),  # lowered for devices that this machine need not have; compiled, in all dtypes, where `XLA_AHEAD` describes them
}
KINDS = tuple(_KIND_DTYPES)

# The first pattern that matches an operator's name decides its family.
_FAMILIES = (
    ("fft", r"fft\.|stft|istft"),
    (
        "linear algebra",
        r"linalg\.|cholesky|svd|geqrf|lu$|lu_|ormqr|pinverse|qr$|triangular_solve|logdet|matrix_exp|cdist|pca_lowrank",
    ),
    (
        "matrix products",
        r"(add|_)?(mm|mv|bmm|dot|vdot|ger|addr|inner|outer|kron|einsum|tensordot|matmul|baddbmm|addbmm)$|addm|__rmatmul__"
        r"|bmm|nn\.functional\.(bi)?linear$|block_diag|trace|torch\._scaled_mm",
    ),
    ("sparse", r"sparse\.|to_sparse"),
    ("attention", r".*attention|.*multi_head"),
    ("convolution", r".*conv|nn\.functional\.(un)?fold|.*pixel_(un)?shuffle|.*channel_shuffle"),
    ("pooling", r".*pool"),
    ("normalization", r".*(_norm(alize)?$|norm_|_norm_|normalize|batch_norm|local_response)|renorm|norm$|dist$"),
    ("loss", r".*(loss|cross_entropy|nll|cosine_similarity|pairwise_distance|pdist|kl_div)"),
    ("interpolation", r".*(interpolate|upsample|grid_sampl|affine_grid)"),
    ("random", r".*(rand|bernoulli|normal$|dropout|multinomial|cauchy|exponential$|geometric|uniform|rrelu)"),
    ("padding", r".*pad"),
    ("embedding", r".*embedding"),
    ("windows", r"signal\.windows|.*window"),
    ("special functions", r"special\.|polygamma|digamma|lgamma|mvlgamma|i0|erf|igamma|sinc$|xlogy|logit"),
    ("masked", r"masked\."),
    ("activation", r"nn\.functional\.|.*softmax|sigmoid$|relu|hardtanh"),
    (
        "sorting",
        r".*(sort|topk|unique|searchsorted|bucketize|kthvalue|median|mode$|histc|histogram|bincount|quantile)|isin$",
    ),
    ("cumulative", r"cum|logcumsumexp|.*trapezoid|trapz|diff$|gradient"),
    (
        "indexing",
        r".*(index|scatter|gather|take|masked_|__getitem__|put|where|nonzero|argwhere|tril_ind|triu_ind|segment_reduce)"
        r"|fill$",
    ),
    (
        "factory",
        r"(.*(arange|linspace|logspace|empty|zeros|ones|full|scalar_tensor|clone|new_|_like)|(eye|complex|polar)$)",
    ),
    (
        "conversion",
        r"(to|bool|byte|char|short|int|long|half|float|double|cfloat|cdouble|chalf|bfloat16|item|contiguous|real|imag"
        r"|resolve.*|view_as_.*)$",
    ),
)

_CLASSES = {
    "UnaryUfuncInfo": "elementwise, one argument",
    "BinaryUfuncInfo": "elementwise, two arguments",
    "ReductionOpInfo": "reduction",
    "ShapeFuncInfo": "shape",
}

_REDUCTIONS = (
    r"(nan)?(sum|mean|prod|std|var|amin|amax|min|max|all|any|aminmax|argm|logsumexp|count_nonzero|norm|.*_mean$)"
)


@dataclass(frozen=True, order=True, slots=True)
class Job:
    """One thing to check.

    Attributes:
        op: Operator, as in `operators`.
        dtype: Name of a dtype in `DTYPES`.
        kind: One of `KINDS`.
    """

    op: str
    dtype: str
    kind: str


@functools.cache
def operators() -> dict[str, Any]:
    """PyTorch's operator database by ``name`` or ``name|variant``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as database
    # Random operators must show that they draw: the database calls them under a seed of its own.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    results = {}
    for info in database.op_db:
        name = f"{info.name}|{info.variant_test_name}" if info.variant_test_name else info.name
        assert name not in results, name
        results[name] = info
    return results


def family(name: str) -> str:
    """The family of an operator, for the report."""
    info = operators()[name]
    plain = info.name
    for label, pattern in _FAMILIES:
        if re.match(pattern, plain):
            return label
    label = _CLASSES.get(type(info).__name__)
    if label is not None:
        return label
    return "reduction" if re.match(_REDUCTIONS, plain) else "shape and other"


def jobs(ops: Iterable[str] | None = None, dtypes: Iterable[str] = (), kinds: Iterable[str] = ()) -> list[Job]:
    """All jobs that the operator database says PyTorch supports on CPU.

    Args:
        ops: Regular expressions; an operator is taken if one matches its whole name. None means all.
        dtypes: Names of dtypes; none means all.
        kinds: Kinds; none means all.

    Returns:
        The jobs, all of one operator together.
    """
    patterns = None if ops is None else [re.compile(p) for p in ops]
    results = []
    for name, info in operators().items():
        if patterns is not None and not any(p.fullmatch(name) for p in patterns):
            continue
        for kind, own in _KIND_DTYPES.items():
            if kinds and kind not in kinds:
                continue
            if kind == "platform" and described.topology() is not None:
                own = tuple(DTYPES)
            results += [Job(name, d, kind) for d in own if (not dtypes or d in dtypes) and _exists(info, d, kind)]
    return results


def _exists(info: Any, dtype: str, kind: str) -> bool:
    if kind == "error":
        return info.error_inputs_func is not None
    if not info.supports_dtype(DTYPES[dtype], "cpu"):
        return False
    if kind == "gradient":
        return has_gradient(info, dtype)
    if kind == "inplace":
        return info.inplace_variant is not None
    return kind != "out" or info.supports_out


def has_gradient(info: Any, dtype: str) -> bool:
    """Whether an operator of the database can be differentiated for a dtype."""
    return info.supports_autograd and DTYPES[dtype] in info.supported_backward_dtypes("cpu")


def candidates() -> list[Job]:
    """Some operators of each family, each with its float32 values where there are such, and one other dtype or kind."""
    by_family: dict[str, list[str]] = {}
    for name in operators():
        by_family.setdefault(family(name), []).append(name)
    chosen = []
    for names in by_family.values():
        for turn, name in enumerate(names[:: max(1, min(8, len(names) // 3))]):
            own = jobs([re.escape(name)])
            # The first is the float32 values where there are such; the other one goes round kinds and dtypes.
            chosen += [own[0], own[1 + turn * 5 % (len(own) - 1)]] if len(own) > 1 else own
    return chosen


def sample() -> set[Job]:
    """Those of the candidates that a commit checks: two kinds of each family, one job of each, in turns."""
    by_family: dict[str, dict[str, list[Job]]] = {}
    for job in candidates():
        by_family.setdefault(family(job.op), {}).setdefault(job.kind, []).append(job)
    results = set()
    for label, by_kind in by_family.items():
        kinds = sorted(by_kind, key=lambda kind: rotation.number(f"{label} {kind}"))
        results |= {rotation.pick(f"{label} {kind}", by_kind[kind]) for kind in kinds[:2]}
    return results
