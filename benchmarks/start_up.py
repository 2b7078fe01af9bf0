"""CPU-seconds of a job until each process has its first all-reduced value, beside those of one process alone.

``python -m benchmarks.start_up 4``: what the launcher imports and who the processes are forked from is counted.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time

_SCRIPT = """
import torch, torch_xla
import torch_xla.core.xla_model as xm

def main(index):
    print(xm.all_reduce("sum", torch.ones(4, device=torch_xla.device())).tolist(), flush=True)

if __name__ == "__main__":
    torch_xla.launch(main)
"""


def _wait_for_orphans() -> None:
    """Who the processes are forked from ends after their launcher, and counts once it is waited for."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def measure(processes: int) -> tuple[float, float]:
    """CPU-seconds and seconds of a job, its launcher included."""
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(processes), "XLA_HOST_COMPUTE": "0"}
    with open(f"/tmp/start_up_{os.getpid()}.py", "w") as script:  # a file: the processes import it anew
        script.write(_SCRIPT)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        subprocess.run([sys.executable, script.name], env=env, check=True, stdout=subprocess.DEVNULL)
    finally:
        os.unlink(script.name)
    _wait_for_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return used, time.perf_counter() - began


def main() -> None:
    """Prints the table."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: its orphans become children of this process
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    alone, seconds = measure(1)
    print(f"1 process: {alone:.1f} CPU-s, {seconds:.1f} s")
    used, seconds = measure(processes)
    print(f"{processes} processes: {used:.1f} CPU-s, {seconds:.1f} s; {used / alone:.2f} times, target 2.5")


if __name__ == "__main__":
    main()
