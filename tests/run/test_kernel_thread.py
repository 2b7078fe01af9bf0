"""OpenMP keeps one team of threads for PyTorch's kernels, however graphs run: of several the threads would sleep."""

from __future__ import annotations

import json

from probes import python

# Prints how many threads there are after ten steps in each way. What imports beside the first lines has ended by then.
STEPS = """
import json, os, sys
import torch, torch_xla
from torch_xla import _config

threads = int(sys.argv[1])
torch.set_num_threads(threads)
names = lambda: [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
at_work = lambda: sum("pt_thread_pool" not in name for name in names())  # PyTorch's other threads, as many as asked for
own_work = lambda: torch.ones(1_000_000).mul(2).sum()
own_work()
x = torch.rand(4, 3, 24, 24)
layers = torch.nn.Conv2d(3, 32, 3), torch.nn.Conv2d(32, 32, 3), torch.nn.Flatten(), torch.nn.Linear(12800, 10)
model = torch.nn.Sequential(*layers)
model(x)
x, model = x.to("xla"), model.to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

def step(reads):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    loss.item() if reads else torch_xla.sync(wait=True)

grown = {}
for hot in ("new", "reads"):
    os.environ["XLA_HOST_COMPUTE"] = hot
    for way in ("barriers", "reads", "own work"):
        for turn in range(10):
            if way == "own work":
                own_work()
            if hot == "1":
                x = torch.cat([x, x[:1]])  # new graphs
            step(way == "reads")
        grown[f"{way}, {hot}"] = at_work()
print(json.dumps(grown))
"""


def test_one_team_after_ten_steps_in_any_way() -> None:
    alone, shared = (json.loads(python("-c", STEPS, count).stdout) for count in ("1", "5"))
    assert {way: shared[way] - alone[way] for way in alone} == dict.fromkeys(alone, 4)
    assert len(alone) == 6


FORK = """
import os
import torch, torch_xla
torch.set_num_threads(4)
work = lambda: torch.ones(1_000_000).mul(2).sum().item()
step = lambda: (torch.ones(1_000_000, device="xla") * 2).sum().item()
work()
for use in (step, work):  # a child may use the device where this process has not
    if not (child := os.fork()):
        assert work() == use() == 2e6
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and work() == step()
"""


def test_a_fork_of_a_thread_that_had_a_team_divides_its_kernels() -> None:
    python("-c", FORK, timeout=60)


def test_the_smallest_numbers_where_a_program_starts_the_thread() -> None:
    program = """
import os, torch, torch_xla
a = torch.full((300, 300), 1e-30).to("xla")
y = torch.nn.functional.conv2d(torch.ones(8, 64, 64, 64).to("xla"), torch.ones(64, 64, 3, 3).to("xla")) * 2
torch_xla.sync(wait=True)
os.environ["XLA_HOST_COMPUTE"] = "new"
assert ((a * 1e-12) + a.sum(0) * 0).cpu().all()
"""
    python("-c", program, imported=True, XLA_HOST_COMPUTE="never", XLA_VERIFY_GRAPHS="0")
