"""What XLA makes of programs of real size on TPUs, compiled for v5e chips without having one.

`python -m benchmarks.tpu_programs [NAME…]` needs the package ``libtpu``. Weights have no values, so a model of any size
takes no memory here. It compiles each for one chip and for 2 × 4 of them, and prints what XLA took, what a chip needs,
and the collectives beside those that theory has.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

from benchmarks import ahead, tpu_models

MIB, GIB = 2**20, 2**30
MEMORY = 16 * GIB  # of a v5e
_COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
HEAD = (
    "| program | over | XLA took | code | arguments | temporaries | a chip needs | collectives | in theory |\n"
    + 9 * "|---"
    + "|"
)
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}


def collectives(text: str) -> dict[str, tuple[int, float]]:
    """Number and MiB of the collectives of a program, by kind.

    A collective in several steps, between which XLA computes, is told by its chain and counted once; one whose result
    is cut at once into what each device keeps is a reduce-scatter.
    """
    found: dict[str, list[float]] = defaultdict(list)
    chains: set[str] = set()
    inside = ""
    for line in text.splitlines():
        if line.endswith("{"):
            inside = line.split(" ", 1)[0]
        match = re.search(rf"= (.*?) ({_COLLECTIVES})(?:-start)?\(", line)
        chain = re.search(r'chain_id="(\d+)"', line)
        if match is None or (chain is not None and chain[1] in chains):
            continue
        if chain is not None:
            chains.add(chain[1])
        kind = "reduce-scatter" if inside.startswith("%all-reduce-scatter") else match[2]
        found[kind].append(sum(_sizes(match[1])) / MIB)
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in sorted(found.items())}


def _sizes(types: str) -> Iterator[int]:
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types):
        size = BYTES.get(dtype, 4)
        for n in filter(None, dims.split(",")):
            size *= int(n)
        yield size


def row(name: str, split: str) -> str:
    """Records and compiles a program; its row of the table."""
    recorded = tpu_models.PROGRAMS[name][0](split)
    lowered = ahead.lowered(ahead.chips())
    began = time.monotonic()
    first = [name, split or "one chip"]
    try:
        program = ahead.compiled(lowered)
    except Exception as error:
        return f"| {' | '.join(first)} | refused: {type(error).__name__}: {str(error)[:300]!r} |"
    seconds = time.monotonic() - began
    memory = program.memory_analysis()
    code, temporary = memory.generated_code_size_in_bytes, memory.temp_size_in_bytes
    arguments = memory.argument_size_in_bytes
    need = arguments + temporary + memory.output_size_in_bytes - memory.alias_size_in_bytes
    cells = [
        *first,
        f"{seconds:.1f} s",
        f"{code / MIB:.1f} MiB",
        f"{arguments / GIB:.2f} GiB",
        f"{temporary / GIB:.2f} GiB",
        f"{need / GIB:.2f} GiB" + ("" if need <= MEMORY else ", too much"),
    ]
    found = collectives(program.as_text())
    cells.append("; ".join(f"{kind} {count}: {size:.1f} MiB" for kind, (count, size) in found.items()) or "none")
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
    os.environ.setdefault("CPU_NUM_DEVICES", str(tpu_models.CHIPS))
    if given.split:
        import torch_xla.runtime as xr

        xr.use_spmd()
    for name in names:
        print(row(name, given.split), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
