"""Makes the C library keep freed memory of CPU programs for the next run."""

from __future__ import annotations

import ctypes
import os

from torch_xla import _config

# Of glibc's <malloc.h> and Linux's <sys/mman.h>.
_TRIM_THRESHOLD, _MAPPINGS, _ARENAS = -1, -4, -8
_ADVICE_HUGE_PAGES = 14
_KEPT = 1 << 30  # bytes
_HUGE_PAGE = 1 << 21  # bytes


def keep_freed() -> None:
    """Lets memory be used again that is freed, some 1 GiB of it, before there is a CPU client.

    A program's intermediate results are one block. The C library asks the kernel for such a one anew in each run, which
    clears its pages: a fifth of a training step. The memory is in huge pages where the kernel has them, which saves
    PyTorch's convolutions a fifth of their processor time in look-ups of addresses. Where the environment says how
    memory is allocated, that holds.
    """
    if not _config.XLA_CPU_KEEP_MEMORY.get() or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ):
        return
    try:
        library = ctypes.CDLL(None)
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return  # another C library
    mallopt(_ARENAS, 1)  # others hold no block of this size
    mallopt(_MAPPINGS, 0)
    mallopt(_TRIM_THRESHOLD, _KEPT + _KEPT // 4)  # so that the heap keeps a block of this size, which nobody touched
    library.malloc.restype = ctypes.c_void_p
    block = library.malloc(ctypes.c_size_t(_KEPT))
    if block:
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_KEPT - _HUGE_PAGE), _ADVICE_HUGE_PAGES)
        library.free(ctypes.c_void_p(block))
