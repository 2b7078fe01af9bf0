"""Has the C library keep the memory that XLA's programs on a CPU free, for the next run."""

from __future__ import annotations

import ctypes
import os

from torch_xla import _config

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MAPPINGS, _ARENAS = -1, -4, -8
_KEPT = 1 << 30  # bytes


def keep_freed() -> None:
    """Lets memory be used again that is freed, up to 1 GiB of it, before there is a CPU client.

    A program's intermediate results are one block. The C library asks the kernel for such a one anew in each run, which
    clears its pages: a fifth of a training step. Where the environment says how memory is allocated, that holds.
    """
    if not _config.XLA_CPU_KEEP_MEMORY.get() or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    mallopt(_ARENAS, 1)  # others hold no block of this size
    mallopt(_MAPPINGS, 0)
    mallopt(_TRIM_THRESHOLD, _KEPT)
