"""What a program may count on stays as it was: generators, warnings filters, signals, environment, float modes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from probes import python

_PROBE = """
import ctypes, gc, json, locale, logging, os, random, signal, sys, threading, warnings
import numpy as np, torch

def float_modes():
    buffer = (ctypes.c_ubyte * 32)()  # fenv_t of x86-64: the last four bytes are MXCSR, whose low six are what happened
    ctypes.CDLL("libm.so.6").fegetenv(ctypes.byref(buffer))
    modes = int.from_bytes(bytes(buffer[28:]), "little") & ~63
    return modes, bytes(buffer[:2]).hex(), torch.tensor(1e-40).mul(1).item()

def caught():  # by the kernel's word, where C code has a handler that Python does not know
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]

def state():
    return {
        "numpy": [str(part) for part in np.random.get_state()], "errors of numpy": np.geterr(),
        "random": str(random.getstate()), "torch": torch.get_rng_state().tolist(),
        "settings of torch": [str(f()) for f in (
            torch.get_default_dtype, torch.get_default_device, torch.get_num_threads, torch.get_num_interop_threads,
            torch.get_float32_matmul_precision, torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled)],
        "warnings": [str(entry) for entry in warnings.filters] + [str(warnings.showwarning)],
        "handlers": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "caught": caught(), "environment": dict(os.environ), "floats": float_modes(),
        "hooks": [str(hook) for hook in (
            sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook, sys.gettrace(),
            sys.getprofile())],
        "logging": [logging.root.level, str(logging.root.handlers), logging.root.manager.disable],
        "process": [os.getcwd(), sys.path, sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(),
                    gc.isenabled(), locale.setlocale(locale.LC_ALL), sorted(os.sched_getaffinity(0))],
    }

def compare(when, before):
    after = state()
    for name in before:
        if before[name] != after[name]:
            os.write(1, f"{json.dumps([when, name])}\\n".encode())  # at once, as other processes write there too
    return after
"""

_ALONE = """
os.environ.pop("XLA_HOST_COMPUTE", None)
np.random.seed(0), random.seed(0), torch.manual_seed(0)
before = state()
import torch_xla
before = compare("import", before)
x = torch.ones(3).to("xla")
before = compare("first tensor", before)
(x * 2).sum().item()
before = compare("first read", before)
model = torch.nn.Linear(3, 4)
before = state()  # its weights were drawn
os.environ["XLA_HOST_COMPUTE"] = "reads"
before = state()
model.to("xla")(x).sum().backward()
torch_xla.sync(wait=True)
before = compare("first compile", before)
import torch_xla.core.xla_model as xm, torch_xla.distributed.parallel_loader, torch_xla.debug.profiler
import torch_xla.distributed.spmd, torch_xla.experimental, torch_xla.runtime, torch_xla.stablehlo
xm.get_stablehlo([x + 1])
before = compare("further modules", before)
warnings.simplefilter("error")
before = state()
if (child := os.fork()) == 0:
    compare("forked child", {**before, "random": str(random.getstate())})  # Python draws a new seed there
    os._exit(0)
os.waitpid(child, 0)
compare("fork", before)
assert not xm.get_rng_state() is None and torch_xla.debug.metrics.metric_data("CompileTime")
print("done")
"""

_JOB = """
def main(index):
    before = state()
    import torch_xla.core.xla_model as xm
    total = xm.all_reduce("sum", torch.ones(2, device="xla") * (index + 1))
    assert total.tolist() == [3, 3]
    compare("first collective", before)
    os.write(1, b"done\\n")

if __name__ == "__main__":
    import torch_xla
    before = state()
    torch_xla.launch(main)
    compare("launch", before)
"""


def _changed(done: list[str]) -> list[tuple[str, str]]:
    return [(when, what) for when, what in (json.loads(line) for line in done if line.startswith("["))]


@pytest.mark.skipif(sys.platform != "linux", reason="it asks the C library and the kernel")
@pytest.mark.costs("a process that imports all anew")
def test_nothing_of_the_process_changes_with_import_use_compile_or_fork() -> None:
    lines = python("-c", _PROBE + _ALONE, devices=1).stdout.splitlines()
    assert _changed(lines) == [] and lines[-1] == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="it asks the C library and the kernel")
@pytest.mark.costs("processes of a job, which start and compile each for itself")
@pytest.mark.own_client("a plugin has as many devices as its library says")
def test_nothing_of_the_process_changes_with_a_job(tmp_path: Path) -> None:
    """But that one of its ranks which is terminated says where it was: a C handler, before the default action."""
    (tmp_path / "job.py").write_text(_PROBE + _JOB)
    lines = python(tmp_path / "job.py", devices=2).stdout.splitlines()
    assert set(_changed(lines)) <= {("first collective", "caught")} and lines.count("done") == 2
