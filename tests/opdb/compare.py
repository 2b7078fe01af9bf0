"""Comparing what an operator gave on device xla with what it gave on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opdb import tolerances
from opdb.samples import tensors_of

Tolerance = Callable[[torch.Tensor], tuple[float, float]]  # relative and absolute, of an expected result


@dataclass
class Outcome:
    """What a call did: a value, or an exception."""

    value: Any = None
    error: Exception | None = None


def attempt(function: Callable[[], Any]) -> Outcome:
    """Calls the function."""
    try:
        return Outcome(function())
    except Exception as error:
        return Outcome(error=error)


def difference(
    op: str, expected: Outcome, got: Outcome, drawn: bool = False, gradient: bool = False, rule: bool = False
) -> str | None:
    """What differs between two outcomes on the CPU, or None.

    Args:
        op: Name of the operator, for its tolerances.
        expected: What PyTorch's CPU kernel did.
        got: What device xla did, fetched to the CPU.
        drawn: Whether the CPU's values change with the seed.
        gradient: Whether they are the gradients by the operator's arguments.
        rule: Whether a rule was lowered alone.
    """
    if expected.error is not None or got.error is not None:
        return _errors(expected.error, got.error)
    want, have = expected.value, got.value
    kind = tolerances.loose(op)
    if kind == "first" and not gradient and isinstance(want, (tuple, list)) and isinstance(have, (tuple, list)):
        want, have = want[0], have[0]
    if kind == "random" and not drawn:
        kind = ""
    return _values(partial(tolerances.of, op, gradient=gradient, rule=rule), kind, want, have, "result")


def _errors(expected: Exception | None, got: Exception | None) -> str | None:
    if expected is None:
        return f"raised {_text(got)}; CPU gives a value"
    if got is None:
        return f"did not raise; CPU raises {_text(expected)}"
    if type(got) is not type(expected):
        return f"raised {_text(got)}; CPU raises {_text(expected)}"
    return None


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error)[:240]}"


def _values(allowed: Tolerance, kind: str, expected: Any, got: Any, where: str) -> str | None:
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{where}: got {type(got).__name__}, CPU gives a tensor"
        return _tensors(allowed, kind, expected, got, where)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(expected):
            return f"{where}: got {type(got).__name__} of another length than the CPU's {len(expected)}"
        result = (
            _values(allowed, kind, e, g, f"{where}[{i}]") for i, (e, g) in enumerate(zip(expected, got, strict=True))
        )
        return next((text for text in result if text), None)
    if isinstance(expected, dict):
        return _values(allowed, kind, list(expected.values()), list(got.values()), where)
    if isinstance(expected, (int, float, complex)) and not isinstance(expected, bool):
        if type(got) is not type(expected):
            return f"{where}: got {got!r}, CPU gives {expected!r}"
        return _tensors(allowed, kind, torch.tensor(expected), torch.tensor(got), where)
    return None if got == expected else f"{where}: got {got!r}, CPU gives {expected!r}"


def _tensors(allowed: Tolerance, kind: str, expected: torch.Tensor, got: torch.Tensor, where: str) -> str | None:
    if got.shape != expected.shape:
        return f"{where}: shape {list(got.shape)}, CPU gives {list(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"{where}: dtype {got.dtype}, CPU gives {expected.dtype}"
    if kind == "uninitialized":
        return None
    if kind == "random":
        return _statistics(expected, got, where)
    relative, absolute = allowed(expected)
    try:
        torch.testing.assert_close(
            got, expected, rtol=relative, atol=absolute, equal_nan=True, check_stride=False, check_layout=True
        )
    except AssertionError as error:
        return f"{where}: {' '.join(str(error).split())[:240]}"
    return None


def _statistics(expected: torch.Tensor, got: torch.Tensor, where: str) -> str | None:
    """Mean within six standard errors."""
    if expected.numel() < 8 or expected.dtype.is_complex:
        return None
    want, have = expected.double(), got.double()
    want, have = want[want.isfinite()], have[have.isfinite()]
    if not want.numel() or not have.numel():
        return None
    error = math.sqrt((want.var(correction=0) + have.var(correction=0)).item() / min(want.numel(), have.numel()))
    off = abs(want.mean() - have.mean()).item()
    if off > 6 * error + 1e-3 * (1 + abs(want.mean().item())):
        return f"{where}: mean {have.mean().item():.4g}, CPU's {want.mean().item():.4g}"
    return None


def same(a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes on the CPU agree exactly."""
    pairs = zip(tensors_of(a.value), tensors_of(b.value), strict=True)
    return all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def devices_wrong(value: Any) -> str | None:
    """Names a result that is not on device xla, or None."""
    for tensor in tensors_of(value):
        if tensor.device.type != "xla":
            return f"a result is on {tensor.device}"
    return None
