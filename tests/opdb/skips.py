"""Jobs that are not run or that are known to fail, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opdb.cases import Job


@dataclass(frozen=True)
class Entry:
    """Some jobs.

    Attributes:
        ops: Regular expression over operator names.
        reason: Why they are in the table.
        dtypes: Regular expression over dtypes.
        kinds: Regular expression over kinds.
    """

    ops: str
    reason: str
    dtypes: str = ".*"
    kinds: str = ".*"


SKIPS = (
    Entry(r"sparse\..*|to_sparse", "the device has no sparse tensors"),
    Entry(r"chalf", "XLA has no complex numbers of half precision"),
    Entry(r"complex|view_as_complex|polar", "XLA has no complex numbers of half precision", dtypes="float16"),
    Entry(
        "addbmm",
        "the CPU kernel gives `self` another shape, which PyTorch's Meta kernel refuses",
        kinds="inplace",
    ),
    Entry(
        r"msort|topk|mode",
        "many elements are equal in 16 bits, and which of them is named, and gets the gradient, is not defined",
        dtypes="bfloat16|float16",
        kinds="gradient",
    ),
    Entry(r"jiterator_.*", "compiles CUDA source text at run time"),
)


# Differences that are not mended: they count as failures of the sweep, and the fixed sample expects them.
KNOWN: tuple[Entry, ...] = ()

# Calls that PyTorch's CPU kernels refuse because of values, which are not read when a call is recorded.
VALUE_ERRORS = (
    r"index -?\d+ is out of bounds for dimension \d+ with size \d+"
    r"|probability tensor contains either|invalid multinomial distribution"
)


def reason(job: Job, table: tuple[Entry, ...] = SKIPS) -> str | None:
    """Why a job is in a table, or None."""
    for entry in table:
        if (
            re.fullmatch(entry.ops, job.op)
            and re.fullmatch(entry.dtypes, job.dtype)
            and re.fullmatch(entry.kinds, job.kind)
        ):
            return entry.reason
    return None
