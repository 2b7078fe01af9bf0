"""Jobs of two processes on this machine, as ratios: `python -m benchmarks.distributed` prints the table.

What is compared is taken in turns in the same processes: an all-reduce against PyTorch's own group and against JAX's
`psum` over XLA's collectives, a training step at the same global batch against one process, what a barrier costs the
host in a job against alone and against one of two unrelated processes, a loader with slow samples, and starting.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ.setdefault("PJRT_DEVICE", "CPU")

SIZES = {"64 KiB": 1 << 14, "1 MiB": 1 << 18, "64 MiB": 1 << 24}
ROUNDS = 7
STEPS = 6

Figures = dict[str, float]


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = perf_counter()
    function()
    return perf_counter() - start


def in_turns(**functions: Callable[[], object]) -> Figures:
    """The median time of each, after one call that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(ROUNDS + 1):
        for name, function in functions.items():
            seconds = timed(function)
            if round_:
                taken[name].append(seconds)
    return {name: median(values) for name, values in taken.items()}


def step_of(rank: int, world: int) -> Callable[[], None]:
    """A training step of GPT-2 on a share of the global batch, with its barrier."""
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm
    from benchmarks import workloads

    model = workloads.gpt2_model().to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = workloads.licence_tokens(4, 128)[0].chunk(world)[rank].contiguous().to("xla")

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync(wait=True)

    return step


def small_step() -> float:
    """Seconds of the host for recording and starting a small step, without waiting for it."""
    import torch

    import torch_xla

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64).to("xla")
    taken = []
    for round_ in range(30):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        start = perf_counter()
        torch_xla.sync()
        if round_ >= 5:
            taken.append(perf_counter() - start)
        torch_xla.sync(wait=True)
    return median(taken)


def in_job(rank: int, folder: str) -> None:
    """What each process of the job measures."""
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla._core.job import session, store

    connection = session.session()
    assert connection is not None
    world = xr.world_size()
    plain = store.host_group(connection.new_store(), rank, world, None)

    def reduce_here(x: torch.Tensor) -> None:
        result = xm.all_reduce(xm.REDUCE_SUM, x)
        torch_xla.sync(wait=True)
        del result

    def reduce_on_host(x: torch.Tensor) -> None:
        plain.allreduce([x]).wait()

    figures: Figures = {}
    for name, count in SIZES.items():
        host = torch.ones(count)
        device = torch.ones(count).to("xla")
        torch_xla.sync(wait=True)

        found = in_turns(ours=partial(reduce_here, device), gloo=partial(reduce_on_host, host))
        figures[f"all-reduce of {name}, ms"] = found["ours"] * 1e3
        figures[f"all-reduce of {name} / PyTorch's Gloo"] = found["ours"] / found["gloo"]
    figures["host time of sync() of a small step, in the job, us"] = small_step() * 1e6
    step = step_of(rank, world)
    step()
    figures["step of GPT-2, two processes, ms"] = median(timed(step) for _ in range(STEPS)) * 1e3
    if rank == 0:
        Path(folder, "job.json").write_text(json.dumps(figures))


def alone(rank: int, folder: str) -> None:
    """The same by one process, which has the whole machine."""
    step = step_of(0, 1)
    step()
    figures = {
        "step of GPT-2, one process, ms": median(timed(step) for _ in range(STEPS)) * 1e3,
        "host time of sync() of a small step, alone, us": small_step() * 1e6,
    }
    Path(folder, "alone.json").write_text(json.dumps(figures))


def beside_another(rank: int, folder: str, number: int) -> None:
    """The small step in one of two processes that have nothing to do with each other, as the control of a job's."""
    Path(folder, f"beside{number}.json").write_text(json.dumps(small_step() * 1e6))


def loader(rank: int, folder: str) -> None:
    """What a batch takes that takes 5 ms to make, as a multiple of the longer of that and a step by itself."""
    import time

    import torch

    import torch_xla
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    class Slow(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(60):
                time.sleep(0.005)
                yield torch.ones(64, 256)

    weight = torch.randn(256, 256).to("xla")

    def step(x: torch.Tensor) -> None:
        for _ in range(8):
            x = torch.tanh(x @ weight)
        torch_xla.sync(wait=True)

    batch = torch.ones(64, 256).to("xla")
    alone_ = [timed(partial(step, batch)) for _ in range(20)][5:]
    loaded, last = [], 0.0
    for x in MpDeviceLoader(torch.utils.data.DataLoader(Slow(), batch_size=None), torch_xla.device()):
        step(x)
        now = perf_counter()
        loaded.append(now - last)
        last = now
    if rank == 0:
        Path(folder, "loader.json").write_text(json.dumps(median(loaded[5:]) / max(median(alone_), 0.005)))


def first_value(rank: int, folder: str) -> None:
    """The shortest job: one all-reduced value. Writes the CPU seconds that it took here."""
    import time

    import torch

    import torch_xla.core.xla_model as xm

    assert xm.all_reduce("sum", torch.ones(1, device="xla")).item() > 0
    seconds = time.process_time()
    if multiprocessing.parent_process() is not None and rank == 0:  # whom they were forked from is in none of them
        ticks = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[11:13]
        seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    Path(folder, f"first{rank}").write_text(str(seconds))


def start_up(world: int) -> float:
    """CPU seconds of all processes until each has the first all-reduced value, the launcher among them."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import time, torch_xla; from benchmarks import distributed; "
            f"torch_xla.launch(distributed.first_value, ({folder!r},)); print(time.process_time())"
        )
        environment = {**os.environ, "CPU_NUM_DEVICES": str(world)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
        launcher = float(done.stdout.split()[-1])
        return launcher if world == 1 else launcher + sum(float(file.read_text()) for file in Path(folder).iterdir())


def jax_psum(rank: int, port: int, folder: str) -> None:
    """JAX's own all-reduce over XLA's collectives, in two processes."""
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, cluster_detection_method="deactivate")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=spec))

    def wait_for_total(x: jax.Array) -> None:
        total(x).block_until_ready()

    figures = {}
    for name, count in SIZES.items():
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x = jax.make_array_from_process_local_data(sharding, np.ones(count, np.float32))
        figures[name] = in_turns(psum=partial(wait_for_total, x))["psum"] * 1e3
    if rank == 0:
        Path(folder, "jax.json").write_text(json.dumps(figures))


def _start_jax(folder: str) -> Figures:
    import socket

    import torch.multiprocessing as mp

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.start_processes(jax_psum, (port, folder), 2, start_method="spawn")  # type: ignore[attr-defined]
    found: Figures = json.loads(Path(folder, "jax.json").read_text())
    return found


def main() -> None:
    """Takes all of it and prints it."""
    from torch_xla._core.job import launcher

    with tempfile.TemporaryDirectory() as folder:
        launcher.run(alone, (folder,), 1)
        launcher.run(in_job, (folder,), 2)
        both = [launcher.run(beside_another, (folder, number), 1, join=False) for number in range(2)]
        for processes in both:
            while not processes.join():
                pass
        launcher.run(loader, (folder,), 2)
        figures: Figures = json.loads(Path(folder, "alone.json").read_text())
        figures |= json.loads(Path(folder, "job.json").read_text())
        psum = _start_jax(folder)
        beside = json.loads(Path(folder, "beside0.json").read_text())
        figures["a loaded batch / max(step, 5 ms)"] = json.loads(Path(folder, "loader.json").read_text())
    figures["CPU seconds to the first value, 4 processes / 1"] = start_up(4) / start_up(1)
    for name in SIZES:
        figures[f"all-reduce of {name} / JAX's psum"] = figures[f"all-reduce of {name}, ms"] / psum[name]
    figures["step of GPT-2 on two processes / one"] = (
        figures["step of GPT-2, two processes, ms"] / figures["step of GPT-2, one process, ms"]
    )
    in_the_job = figures["host time of sync() of a small step, in the job, us"]
    figures["host time of sync() in a job / alone"] = (
        in_the_job / figures["host time of sync() of a small step, alone, us"]
    )
    figures["host time of sync() in a job / beside an unrelated process"] = in_the_job / beside
    for name, value in figures.items():
        print(f"{name:<62} {value:>10.3f}")


if __name__ == "__main__":
    main()
