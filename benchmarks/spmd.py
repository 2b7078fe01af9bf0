"""What SPMD costs on eight CPU devices: `python -m benchmarks.spmd` prints each figure beside its target.

Each side runs in a process of its own, because the number of devices is that of a process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

LEAVES, ROUNDS = 250, 30
TARGETS = {
    "sync_ms_8 / sync_ms_1": 8.0,
    "sync_ms_8 / jax_call_ms_8": 1.2,
    "compile_s_8 / compile_s_1": 1.5,
    "bytes per device, FSDP / whole": 0.2,
    "put_ms / jax_put_ms": 0.5,
}


def timed(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median milliseconds of a call."""
    took = []
    for _ in range(rounds):
        start = perf_counter()
        function()
        took.append(perf_counter() - start)
    return statistics.median(took) * 1000


def side(devices: int) -> dict[str, float]:
    """The figures of a process with so many devices."""
    import numpy as np
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    if devices > 1:
        xr.use_spmd()
    mesh = xs.Mesh(np.arange(devices), (devices, 1), ("fsdp", "tensor"))
    figures: dict[str, float] = {}

    leaves = [torch.ones(8 * devices, 520).to("xla") for _ in range(LEAVES)]
    for leaf in leaves:
        if devices > 1:
            xs.mark_sharding(leaf, mesh, ("fsdp", None))

    def sync() -> float:
        for leaf in leaves:
            leaf.add_(1.5)
        start = perf_counter()
        torch_xla.sync()
        took = perf_counter() - start
        xm.wait_device_ops()
        return took

    for _ in range(3):
        sync()
    figures["sync_ms"] = statistics.median(sync() for _ in range(ROUNDS)) * 1000
    figures["jax_call_ms"] = jax_call(devices)
    if devices > 1:
        batch = torch.randn(64, 4096)
        spec = xs.ShardingSpec(mesh, ("fsdp", None))
        figures["put_ms"] = timed(lambda: xm.send_cpu_data_to_device([batch], torch_xla.device(), spec))
        figures["jax_put_ms"] = jax_put(batch.numpy())
    leaves.clear()

    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True) for _ in range(6)]
    model: torch.nn.Module = torch.nn.Sequential(*layers).to("xla")
    if devices > 1:
        model = SpmdFullyShardedDataParallel(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = met.metric_data("CompileTime")[1] if met.metric_data("CompileTime") else 0
    for _ in range(2):
        x = torch.randn(16, 32, 256).to("xla")
        if devices > 1:
            xs.mark_sharding(x, mesh, ("fsdp", None, None))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    figures["compile_s"] = met.metric_data("CompileTime")[1] / 1e9 - before / 1e9
    state = [value for group in optimizer.state.values() for value in group.values() if value.dim()]
    held = torch_xla._core.execute.barrier.buffers([p.detach() for p in model.parameters()] + state)
    figures["bytes"] = float(sum(buffer.addressable_shards[0].data.nbytes for buffer in held))
    return figures


def jax_call(devices: int) -> float:
    """Milliseconds that JAX takes to start the same program on arrays that are split the same."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    arrays = [jax.device_put(np.ones((8 * devices, 520), np.float32), split) for _ in range(LEAVES)]
    step = jax.jit(lambda values: [value + 1.5 for value in values], donate_argnums=0)
    took = []
    for _ in range(ROUNDS):
        start = perf_counter()
        arrays = step(arrays)
        took.append(perf_counter() - start)
        jax.block_until_ready(arrays)
    return statistics.median(took) * 1000


def jax_put(array: object) -> float:
    """Milliseconds of `jax.device_put` of a batch."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    split = NamedSharding(Mesh(np.array(jax.devices("cpu")), ("x",)), PartitionSpec("x"))
    return timed(lambda: jax.device_put(array, split))


def main() -> None:
    """Prints the table."""
    sides = {}
    for devices in (1, 8):
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
        command = [sys.executable, "-m", "benchmarks.spmd", str(devices)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        sides[devices] = json.loads(done.stdout.splitlines()[-1])
    one, eight = sides[1], sides[8]
    found = {
        "sync_ms_8 / sync_ms_1": eight["sync_ms"] / one["sync_ms"],
        "sync_ms_8 / jax_call_ms_8": eight["sync_ms"] / eight["jax_call_ms"],
        "compile_s_8 / compile_s_1": eight["compile_s"] / one["compile_s"],
        "bytes per device, FSDP / whole": eight["bytes"] / one["bytes"],
        "put_ms / jax_put_ms": eight["put_ms"] / eight["jax_put_ms"],
    }
    print(json.dumps(sides, indent=1))
    for words, value in found.items():
        print(f"{words:<40} {value:8.3f}  <= {TARGETS[words]:g}  {'ok' if value <= TARGETS[words] else 'MISSED'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(side(int(sys.argv[1]))))
    else:
        main()
