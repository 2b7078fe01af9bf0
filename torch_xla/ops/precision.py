"""Sets the precision of float32 products: this package's setting if there is one, else PyTorch's.

CPUs compute in full float32 whatever the setting; GPUs and TPUs have faster ways that keep fewer bits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from torch_xla._torch_internals import convolutions_use_tf32, fp32_precision, matmul_precision

LEVELS = ("default", "high", "highest")

_chosen: str | None = None


class Precision(NamedTuple):
    """Names of JAX's levels for products of matrices and for convolutions; ``default`` is the device's fastest."""

    products: str
    convolutions: str


_levels = functools.cache(Precision)  # asked for at every barrier


def choose(level: str | None) -> None:
    """Sets the level of products and convolutions; None leaves it to PyTorch's settings again."""
    global _chosen
    _chosen = level


def chosen() -> str | None:
    """The level that `choose` set."""
    return _chosen


def current() -> Precision:
    """The levels in force; part of what a program is, so it asks PyTorch in the shortest way."""
    if _chosen is not None:
        return _levels(_chosen, _chosen)
    try:
        level, fast = matmul_precision(), convolutions_use_tf32()
    except RuntimeError:  # set by the newer name of one, `fp32_precision`, which the older one refuses to translate
        level, fast = _products(), _fast_convolutions()
    # PyTorch has a setting of its own for convolutions, and it allows the faster ones unless told otherwise.
    if level == "medium":
        return _levels("default", "default")
    return _levels(level, "high" if fast else "highest")


def _products() -> str:
    try:
        return matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def _fast_convolutions() -> bool:
    try:
        return convolutions_use_tf32()
    except RuntimeError:
        return fp32_precision("cuda", "conv") == "tf32"
