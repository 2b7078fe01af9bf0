"""What XLA makes of programs of real size on TPUs, compiled for v5e chips without having one.

`python -m benchmarks.tpu_programs [NAME…]` needs the package ``libtpu``. Weights have no values, so a model of any size
takes no memory here. It compiles each for one chip and for 2 × 4 of them, and prints what XLA took, what a chip needs,
and the collectives beside those that theory has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import ahead, tpu_models

MIB, GIB = 2**20, 2**30
HEAD = (
    "| program | over | XLA took | code | arguments | temporaries | a chip needs | collectives | in theory |\n"
    + 9 * "|---"
    + "|"
)


def row(name: str, split: str) -> str:
    """Records and compiles a program; its row of the table."""
    recorded = tpu_models.PROGRAMS[name][0](split)
    first = [name, split or "one chip"]
    try:
        program = ahead.compiled()
    except Exception as error:
        return f"| {' | '.join(first)} | refused: {type(error).__name__}: {str(error)[:300]!r} |"
    memory = program.memory
    need = memory.total - memory.code
    cells = [
        *first,
        f"{program.seconds:.1f} s",
        f"{memory.code / MIB:.1f} MiB",
        f"{memory.arguments / GIB:.2f} GiB",
        f"{memory.temporaries / GIB:.2f} GiB",
        f"{need / GIB:.2f} GiB" + ("" if program.fits else ", too much"),
    ]
    cells.append("; ".join(f"{c.kind} {c.count}: {c.nbytes / MIB:.1f} MiB" for c in program.collectives) or "none")
    cells.append("; ".join(f"{kind} {size:.1f} MiB" for kind, size in recorded.plan.items()) or "none")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Prints a row for each; a process each, so that one that the compiler ends is no more than its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of programs; all by default", metavar="NAME")
    parser.add_argument("--split", help="over 2 × 4 chips by these axes only, or none of them", metavar="AXES")
    parser.add_argument("--here", action="store_true", help="in this process")
    given = parser.parse_args()
    names = given.names or list(tpu_models.PROGRAMS)
    if not given.here:
        print(HEAD, flush=True)
        command = [sys.executable, "-m", "benchmarks.tpu_programs", "--here"]
        return max(
            subprocess.run([*command, "--split", split, name]).returncode
            for name in names
            for split in ("", *tpu_models.PROGRAMS[name][1])
            if given.split in (None, split)
        )
    ahead.describe()
    if given.split:
        import torch_xla.runtime as xr

        xr.use_spmd()
    for name in names:
        print(row(name, given.split), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
