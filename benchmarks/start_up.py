"""CPU-seconds of fresh processes until the first value, beside JAX's own; with programs kept on disk; and in a job.

``python -m benchmarks.start_up 4`` takes a job of four processes: what the launcher imports and who the processes are
forked from is counted.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from statistics import median

_ROUNDS = 5

_JAX = """
import time, jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.maximum(x @ x, 0).sum())(jnp.ones((4, 4))).item())
print(time.process_time())
"""

_OURS = """
import time, torch, torch_xla
print(time.process_time())
x = torch.ones(4, 4, device="xla")
print(torch.relu(x @ x).sum().item())
print(time.process_time())
"""

_GPT = """
import sys, time, torch, torch_xla
from torch import nn
print(time.process_time())
torch_xla.runtime.initialize_cache(sys.argv[1])

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 256), nn.Embedding(128, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 8, 1024, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(6)
        )
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 256, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))

torch.manual_seed(0)
model = GPT().to("xla")
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(256, (4, 128)).to("xla")
loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
loss.backward()
optimizer.step()
torch_xla.sync()
print(loss.item())
print(time.process_time())
"""

_JOB = """
import torch, torch_xla
import torch_xla.core.xla_model as xm

def main(index):
    print(xm.all_reduce("sum", torch.ones(4, device=torch_xla.device())).tolist(), flush=True)

if __name__ == "__main__":
    torch_xla.launch(main)
"""


def _run(script: str, *arguments: str) -> tuple[float, float]:
    """CPU-seconds that a process prints first and last: after its imports, where it prints them, and at its end."""
    env = os.environ | {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "XLA_HOST_COMPUTE": "never"}
    command = [sys.executable, "-c", script, *arguments]
    lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
    return float(lines[0]), float(lines[-1])


def alone() -> tuple[float, float, float]:
    """CPU-seconds to the first value: JAX's from the interpreter's start, ours after and with the imports."""
    rows = [(_run(_JAX)[1], *_run(_OURS)) for _ in range(_ROUNDS)]
    return median(r[0] for r in rows), median(r[2] - r[1] for r in rows), median(r[2] for r in rows)


def kept() -> tuple[float, float]:
    """CPU-seconds from the imports to the first loss of a small GPT: compiled, and with its program on disk."""
    colds: list[float] = []
    warms: list[float] = []
    for _ in range(_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            for times in (colds, warms):
                imported, end = _run(_GPT, folder)
                times.append(end - imported)
    return median(colds), median(warms)


def _wait_for_orphans() -> None:
    """Who the processes are forked from ends after their launcher, and counts once it is waited for."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def job(processes: int) -> tuple[float, float]:
    """CPU-seconds and seconds of a job until each process has its first all-reduced value, its launcher included."""
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(processes), "XLA_HOST_COMPUTE": "never"}
    with open(f"/tmp/start_up_{os.getpid()}.py", "w") as script:  # a file: the processes import it anew
        script.write(_JOB)
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
    hand, ours, whole = alone()
    print(f"first value: JAX {hand:.2f} CPU-s, torch_xla {ours:.2f} after its imports ({whole:.2f} with them and")
    print(f"  PyTorch's); {ours / hand:.2f} times, target 2")
    cold, warm = kept()
    print(f"small GPT: {cold:.2f} CPU-s compiled, {warm:.2f} from disk; {warm / cold:.2f}, target 0.4")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: its orphans become children of this process
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    one, seconds = job(1)
    print(f"1 process: {one:.1f} CPU-s, {seconds:.1f} s")
    used, seconds = job(processes)
    print(f"{processes} processes: {used:.1f} CPU-s, {seconds:.1f} s; {used / one:.2f} times, target 2.5")


if __name__ == "__main__":
    main()
