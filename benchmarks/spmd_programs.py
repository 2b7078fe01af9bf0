"""What XLA makes of split training steps on a TPU, compiled for a v5e of eight chips without one.

`python -m benchmarks.spmd_programs` needs the package ``libtpu``: it prints the collectives of a step by kind, with
their bytes, and the memory of a device. XLA takes some minutes for each program; arguments take some of them.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

LAYERS, WIDTH, HEADS, BATCH, LENGTH, VOCABULARY = 2, 256, 4, 16, 128, 1024
KINDS = ("fsdp", "fsdp-tensor")
_COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}


class Layer(torch.nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.RMSNorm(WIDTH), torch.nn.RMSNorm(WIDTH)])
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a gated product."""
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


class Llama(torch.nn.Module):
    """Layers between an embedding and its use as weights of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = torch.nn.RMSNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.linear(self.norm(x), self.embed.weight)


def record(kind: str) -> list[Any]:
    """Records a training step, which stays pending as long as somebody has what it computes."""
    import functools

    import torch_xla.distributed.spmd as xs
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    model: torch.nn.Module = Llama().to("xla")
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH)).to("xla")
    if kind == "fsdp":
        mesh = xs.Mesh(np.arange(8), (8, 1), ("fsdp", "tensor"))
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
        model = SpmdFullyShardedDataParallel(model, mesh=mesh, auto_wrap_policy=policy)
    else:
        mesh = xs.Mesh(np.arange(8), (4, 2), ("fsdp", "tensor"))
        for name, param in model.named_parameters():
            if param.dim() == 2:
                out = name.endswith(("o.weight", "down.weight", "embed.weight"))
                xs.mark_sharding(param, mesh, ("fsdp", "tensor") if out else ("tensor", "fsdp"))
        for layer in model.layers:  # type: ignore[union-attr]
            layer.register_forward_hook(lambda module, args, out: xs.mark_sharding(out, mesh, ("fsdp", None, None)))
    xs.mark_sharding(tokens, mesh, ("fsdp", None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logits = model(tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [model, optimizer, logits]


def compiled() -> Any:
    """The pending step for the topology."""
    from jax.experimental import topologies

    from torch_xla import _bindings
    from torch_xla._core.device import placement, splits
    from torch_xla._core.graph import graph
    from torch_xla._core.lower import lowering

    devices = tuple(topologies.get_topology_desc("v5e:2x4", platform="tpu").devices)
    own = placement.of(0)
    there = replace(own, devices=devices, local=devices, sharding=splits.sharding(None, devices))
    described = graph.describe(_bindings.Cut.of_device(0).preview())
    asked, placement.of = placement.of, lambda index: there
    try:
        return lowering.lower(described, "step", platform="tpu").stage.compile()
    finally:
        placement.of = asked


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
        sizes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        elements = [BYTES.get(dtype, 4) * int(np.prod([int(n) for n in dims.split(",") if n])) for dtype, dims in sizes]
        found[kind].append(sum(elements) / 2**20)
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in sorted(found.items())}


def main(kinds: Sequence[str]) -> None:
    """Prints a table for each."""
    import torch_xla
    import torch_xla.runtime as xr

    xr.use_spmd()
    for kind in kinds:
        torch.manual_seed(0)
        held = record(kind)
        program = compiled()
        memory = program.memory_analysis()
        matrices = sum(p.numel() * p.element_size() for p in held[0].parameters()) / 2**20
        print(f"{kind}: parameters of {matrices:.1f} MiB")
        for name, (count, size) in collectives(program.as_text()).items():
            print(f"  {name:<20} {count:>5} {size:>9.1f} MiB")
        peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
        print(f"  memory of a device   {peak / 2**20:>15.1f} MiB", flush=True)
        torch_xla.sync()


if __name__ == "__main__":
    main(sys.argv[1:] or KINDS)
