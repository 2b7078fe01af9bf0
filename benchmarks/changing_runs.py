"""What processes do that meet new graphs: `python -m benchmarks.changing_runs steps gpt2 xla` in a fresh one.

The last word is `xla`, `cpu` for torch eager or `inductor` for torch.compile. The results are printed as JSON;
`benchmarks.changing` compares them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import torch_xla
from benchmarks import workloads
from torch_xla import _metrics

STEPS = 5
BATCHES = 200
TOKENS = 48
CALLS = 6
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True},
    "beam": {"do_sample": False, "num_beams": 3},
}


def _memory(key: str) -> float:
    """MiB of this process: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index(f"{key}:") + 1]) / 1024


def _place(side: str) -> str:
    """The device of a side."""
    return "xla" if side == "xla" else "cpu"


def _placed(model: Any, side: str, **options: Any) -> Any:
    """The model where a side has it; torch.compile gets the options."""
    if side == "inductor":
        workloads.compile_in_place(model, **options)
    return model.to(_place(side))


def _barrier(device: str) -> None:
    if device == "xla":
        torch_xla.sync()


def _compiles() -> int:
    return _metrics.counter("UncachedCompile") or 0


def steps(name: str, device: str) -> dict[str, Any]:
    """Seconds and CPU-seconds of the first steps of a workload, and how much memory the first took at most."""
    workload = workloads.gpt2(device, layers=24) if name == "gpt2_24" else workloads.build(name, device)
    _barrier(device)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, peak = _memory("VmRSS"), 0.0
    times: list[tuple[float, float]] = []
    for i in range(STEPS):
        wall, processor = perf_counter(), process_time()
        loss = workload.step()
        _barrier(device)
        loss.item()
        times.append((perf_counter() - wall, process_time() - processor))
        peak = peak if i else _memory("VmHWM") - before
    return {"seconds": [wall for wall, _ in times], "processor": [used for _, used in times], "peak": peak}


class _Gate(nn.Module):
    """Operators that XLA would make one loop of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(64) / 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.a * x + self.b) * torch.sigmoid(self.c * x + self.d).square()


def ragged(kind: str, side: str, batches: str = str(BATCHES)) -> dict[str, Any]:
    """Seconds of training steps on batches of ever other lengths, compiles, and resident memory on the way."""
    torch.manual_seed(0)
    lengths = random.Random(0)
    layers: list[nn.Module]
    if kind == "lm":
        layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
    else:
        layers = [_Gate() for _ in range(12)]
    model = _placed(nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256)), side, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _barrier(side)
    start, memory = perf_counter(), []
    for i in range(int(batches)):
        tokens = torch.randint(0, 256, (4, lengths.randrange(20, 160))).to(_place(side))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        _barrier(side)
        value = loss.item()
        if i % BATCHES == BATCHES - 1:
            memory.append(_memory("VmRSS"))
    return {"seconds": perf_counter() - start, "compiles": _compiles(), "loss": value, "memory": memory}


def _model(kind: str) -> Any:
    """A small model for texts, with random weights."""
    import transformers

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    width, layers, vocabulary = (512, 8, 1000) if kind == "large" else (64, 2, 100)
    shape: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 99, "pad_token_id": 0}
    if kind == "gpt2":
        shape |= {"n_positions": 256, "n_embd": width, "n_layer": layers, "n_head": 4}
    elif kind == "t5":
        shape |= {"d_model": width, "d_kv": 16, "d_ff": 2 * width, "num_layers": layers, "num_heads": 4}
        shape |= {"decoder_start_token_id": 0}
    else:
        shape |= {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 2 * width}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = transformers.AutoConfig.for_model("llama" if kind == "large" else kind, **shape)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()


def generate(kind: str, cache: str, mode: str, side: str, tokens: str = str(TOKENS)) -> dict[str, list[Any]]:
    """Milliseconds a token of calls of `generate`, their compiles, and the ids."""
    options = MODES[mode] | ({"cache_implementation": "static", "disable_compile": True} if cache == "static" else {})
    model = _model(kind)
    prompt = torch.randint(1, 90, (1, 8))

    def call(count: int) -> Any:
        torch.manual_seed(1)
        start = prompt.to(model.device)
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        return model.generate(start, attention_mask=torch.ones_like(start), **lengths, **options).tolist()

    call(2)  # what it imports
    model = _placed(model, side)
    calls: dict[str, list[Any]] = {"ms": [], "compiles": [], "ids": []}
    for _ in range(CALLS if int(tokens) == TOKENS else 1):
        before, start = _compiles(), perf_counter()
        calls["ids"].append(call(int(tokens)))
        calls["ms"].append((perf_counter() - start) * 1e3 / int(tokens))
        calls["compiles"].append(_compiles() - before)
    return calls


@torch.no_grad()
def decode(kind: str, side: str) -> dict[str, list[Any]]:
    """Milliseconds a token of decoding with a static cache, greedily, and the ids: torch_xla replays a token."""
    from transformers import StaticCache

    model = _model(kind)
    prompt = torch.randint(1, 90, (1, 8))
    model = _placed(model, side)
    length = prompt.shape[1] + TOKENS
    cache = StaticCache(config=model.config, max_cache_len=length)
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    token, position = ids[:, :1].clone(), ids[0, :1].clone()

    def choose(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(tokens, past_key_values=cache, position_ids=positions[None]).logits[:, -1:].argmax(-1)

    def begin() -> None:
        cache.reset()
        ids[:, : prompt.shape[1]] = prompt.to(model.device)
        token.copy_(choose(ids[:, : prompt.shape[1]], torch.arange(prompt.shape[1], device=model.device)))
        position.fill_(prompt.shape[1])

    def advance() -> None:
        ids.index_copy_(1, position, token)
        token.copy_(choose(token, position))
        position.add_(1)

    begin()
    step = advance
    if side == "xla":
        graph = torch_xla.Graph()
        with graph:
            advance()
        step = graph.replay
    calls: dict[str, list[Any]] = {"ms": [], "ids": []}
    for _ in range(CALLS):
        begin()
        ids.tolist()
        start = perf_counter()
        for _ in range(TOKENS):
            step()
        calls["ids"].append(ids.tolist())
        calls["ms"].append((perf_counter() - start) * 1e3 / TOKENS)
    return calls


if __name__ == "__main__":
    runs: dict[str, Callable[..., dict[str, Any]]] = {
        "steps": steps,
        "ragged": ragged,
        "generate": generate,
        "decode": decode,
    }
    print(json.dumps(runs[sys.argv[1]](*sys.argv[2:])))
