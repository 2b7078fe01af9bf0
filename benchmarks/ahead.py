"""Programs of this process for TPUs that are not here, as `torch_xla.ahead` reports them; package libtpu compiles."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

SETTINGS = {"XLA_AHEAD": "v5e:2x4", "PJRT_DEVICE": "TPU"}


def available() -> bool:
    """Whether that package is installed."""
    return importlib.util.find_spec("libtpu") is not None


def describe() -> None:
    """Makes the devices of this process those of a slice; to be called before the package is imported."""
    os.environ.update(SETTINGS)


def compiled() -> Any:
    """Compiles what is pending; what there is to say of the program."""
    import torch_xla
    from torch_xla import ahead

    torch_xla.sync()
    return ahead.report().programs[-1]
