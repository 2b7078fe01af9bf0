"""Settings of the device, beside those that PyTorch has for others in ``torch.backends``."""

from __future__ import annotations

import logging

from torch_xla._errors import listing, message
from torch_xla.ops import precision as _precision

__all__ = ["get_mat_mul_precision", "set_mat_mul_precision"]

logger = logging.getLogger(__name__)

_WARNING_MESSAGE = "The precision of matrix products changed; graphs are compiled again with it."


def set_mat_mul_precision(precision: str) -> None:
    """Sets how exactly products of float32 matrices, and convolutions, are computed; comes before PyTorch's settings.

    Without it ``torch.set_float32_matmul_precision`` and ``torch.backends.cuda.matmul.allow_tf32`` decide, and
    ``torch.backends.cudnn.allow_tf32`` for convolutions. CPUs always compute in full float32.

    Args:
        precision: ``"default"`` for the device's fastest way (bfloat16 on TPU, TF32 on GPU), ``"high"`` for three
            bfloat16 passes or TF32, ``"highest"`` for float32.

    Raises:
        ValueError: `precision` is none of these.
    """
    if precision not in _precision.LEVELS:
        raise ValueError(
            message(
                "backends",
                f"got precision {precision!r}",
                expected=listing(_precision.LEVELS),
                do="pass one of them",
            )
        )
    logger.warning(_WARNING_MESSAGE)
    _precision.choose(precision)


def get_mat_mul_precision() -> str:
    """The precision that `set_mat_mul_precision` set; ``"default"`` if it was not called."""
    return _precision.chosen() or "default"
