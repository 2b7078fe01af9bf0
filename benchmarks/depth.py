"""How the time to compile a step grows with a model's layers, with layers rolled up into loops and without.

`python -m benchmarks.depth` compiles steps of AdamW for a TPU v5e, without having one (package ``libtpu``).
`python -m benchmarks.depth --cpu` compiles and runs them here. A process each; lowering and XLA in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import processes

MIB = 2**20
MODELS = ("gpt2", "llama")
TPU_LAYERS, CPU_LAYERS = (8, 16, 32), (6, 24, 48)
HEADS = {
    True: "| model | layers | rolled | lowering | XLA | code | temporaries | step |",
    False: "| model | layers | rolled | lowering | XLA | code | temporaries |",
}
_STEPS = 8


def model_of(name: str, layers: int) -> torch.nn.Module:
    """A language model 256 wide."""
    import transformers as t

    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                n_layer=layers, n_embd=256, n_head=8, n_positions=128, vocab_size=1024,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            num_hidden_layers=layers, hidden_size=256, intermediate_size=768, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=1024, max_position_embeddings=128, use_cache=False,
        )
    )  # fmt: skip


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Any:
    """Records a step; its loss."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def ahead_of_time(name: str, layers: int) -> dict[str, float]:
    """Compiles a step for a TPU."""
    from benchmarks import ahead, tpu_models

    ahead.describe()
    import torch_xla  # noqa: F401

    with torch.device("meta"):
        empty = model_of(name, layers)
    model = tpu_models.without_values(empty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tpu_models.stepped(model, optimizer)
    loss = step(model, optimizer, tpu_models.empty((4, 128), torch.int64))
    memory = ahead.compiled().memory
    del loss
    return {
        "lowering": total("LoweringTime"),
        "XLA": total("CompileTime"),
        "code": memory.code / MIB,
        "temporaries": memory.temporaries / MIB,
    }


def total(metric: str) -> float:
    """Seconds that a stage took in this process."""
    import torch_xla.debug.metrics as met

    data = met.metric_data(metric)
    return data[1] / 1e9 if data else 0.0


def here(name: str, layers: int) -> dict[str, float]:
    """Compiles a step for this machine and runs it."""
    import torch_xla
    from torch_xla._core.compile import cache

    device = torch_xla.device()
    torch.manual_seed(0)
    model = model_of(name, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1024, (4, 128)).to(device)
    torch_xla.sync(wait=True)
    seconds = []
    for _ in range(_STEPS):
        began = time.monotonic()
        step(model, optimizer, ids)
        torch_xla.sync(wait=True)
        seconds.append(time.monotonic() - began)
    memory = [e.loaded.get_compiled_memory_stats() for e in cache._executables.values()]
    return {
        "lowering": total("LoweringTime"),
        "XLA": total("CompileTime"),
        "code": max(m.generated_code_size_in_bytes for m in memory) / MIB,
        "temporaries": max(m.temp_size_in_bytes for m in memory) / MIB,
        "step": statistics.median(seconds[2:]) * 1e3,
    }


def measured(name: str, layers: int, rolled: bool, cpu: bool) -> dict[str, float]:
    """The figures of one model, in a process of its own."""
    settings = {"XLA_ROLL_LAYERS": "4" if rolled and layers < 8 else str(int(rolled)), "XLA_HOST_COMPUTE": "reads"}
    where = ["--cpu"] if cpu else []
    figures: dict[str, float] = processes.measured("depth", *where, "--one", name, str(layers), settings=settings)
    return figures


def row(name: str, layers: int, rolled: bool, found: dict[str, float]) -> str:
    """A row of the table."""
    units = {"lowering": "s", "XLA": "s", "code": "MiB", "temporaries": "MiB", "step": "ms"}
    cells = [f"{found[key]:.2f} {unit}" for key, unit in units.items() if key in found]
    return f"| {' | '.join([name, str(layers), 'yes' if rolled else 'no', *cells])} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="compile for this machine, and run it")
    parser.add_argument("--layers", type=int, nargs="+", help="how many layers")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "LAYERS"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps((here if asked.cpu else ahead_of_time)(asked.one[0], int(asked.one[1]))))
        return
    head = HEADS[asked.cpu]
    print(head, "|" + "---|" * (head.count("|") - 1), sep="\n")
    for name in asked.models:
        for layers in asked.layers or (CPU_LAYERS if asked.cpu else TPU_LAYERS):
            for rolled in (False, True):
                print(row(name, layers, rolled, measured(name, layers, rolled, asked.cpu)), flush=True)


if __name__ == "__main__":
    main()
