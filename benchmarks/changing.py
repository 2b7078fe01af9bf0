"""Programs whose graphs are new: first steps, ragged batches and `generate`, as ratios to torch eager.

Graphs run operator by operator until they repeat (`XLA_COMPILE_WHEN_HOT=1`). Each side has a process of its own, and
one thread for operators: with more, torch eager waits at each of OpenMP's barriers for whoever else uses the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from benchmarks.processes import measured

Figures = dict[str, float]

ROUNDS = 3
# Tokens that are drawn from compiled graphs, each of which may be a program.
DRAWN = 6
WORKLOADS = {"mlp": "(a)", "resnet": "(b)", "gpt2": "(c)", "gpt2_24": "(c) of 24 layers"}
RAGGED = {"lm": "a language model", "gates": "elementwise layers"}
# Model, kind of cache, way to choose; all are tiny but the large one, a Llama of 8 layers that is 512 wide.
CASES = [
    (model, cache, mode)
    for model in ("llama", "gpt2", "t5", "qwen2")
    for cache in ("dynamic", "static")
    for mode in ("greedy", "sample", "beam")
]
CASES += [("large", cache, "greedy") for cache in ("dynamic", "static")]


def _run(*arguments: str, hot: bool = True) -> dict[str, Any]:
    """What a fresh process measures."""
    settings = {"XLA_COMPILE_WHEN_HOT": str(int(hot)), "OMP_NUM_THREADS": "1"}
    result: dict[str, Any] = measured("changing_runs", *arguments, settings=settings)
    return result


def _rounds(*arguments: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What a device and torch eager do, in turns."""
    return [(_run(*arguments, "xla"), _run(*arguments, "cpu")) for _ in range(ROUNDS)]


def first_steps(name: str) -> Figures:
    """Each of the first steps ÷ torch eager's, and the memory that the first one takes ÷ eager's."""
    rounds = _rounds("steps", name)
    seconds = [list(zip(ours["seconds"], eager["seconds"], strict=True)) for ours, eager in rounds]
    return {
        f"new_{name}_peak_ratio": median(ours["peak"] / eager["peak"] for ours, eager in rounds),
        f"new_{name}_peak_mb": median(ours["peak"] for ours, _ in rounds),
        **{
            f"new_{name}_step_{i + 1}_ratio": median(ours / eager for ours, eager in pairs)
            for i, pairs in enumerate(zip(*seconds, strict=True))
        },
        f"new_{name}_step_ms": median(pairs[0][0] for pairs in seconds) * 1e3,
    }


def ragged(kind: str) -> Figures:
    """Seconds of training on batches of ever other lengths ÷ torch eager's, and how many graphs were compiled."""
    rounds = _rounds("ragged", kind)
    return {
        f"ragged_{kind}_ratio": median(ours["seconds"] / eager["seconds"] for ours, eager in rounds),
        f"ragged_{kind}_compiles": rounds[0][0]["compiles"],
    }


def generate(model: str) -> Figures:
    """First and later calls ÷ torch eager's, compiles, and in how many the ids are those expected.

    Draws are those of the same seed where every graph is compiled; all else is what the CPU gives.
    """
    figures: Figures = {}
    for case in CASES:
        if case[0] != model:
            continue
        found, key = _run("generate", *case), "_".join(("generate", *case))
        ratios = [ours / eager for ours, eager in zip(found["xla"], found["cpu"], strict=True)]
        expected = found["cpu_ids"]
        if case[2] == "sample":
            drawn = _run("generate", *case, str(DRAWN), hot=False)["xla_ids"][0][0]
            found["xla_ids"] = [[ids[0][: len(drawn)]] for ids in found["xla_ids"]]
            expected = [[drawn]] * len(expected)
        same = [ours == ids for ours, ids in zip(found["xla_ids"], expected, strict=True)]
        figures |= {f"{key}_first_ratio": ratios[0], f"{key}_ratio": median(ratios[1:]), f"{key}_same": sum(same)}
        figures |= {f"{key}_compiles": found["compiles"][0], f"{key}_later_compiles": sum(found["compiles"][1:])}
    return figures


MEASURES: dict[str, Callable[[], Figures]] = {
    **{f"new_{name}": partial(first_steps, name) for name in WORKLOADS},
    **{f"ragged_{kind}": partial(ragged, kind) for kind in RAGGED},
    **{f"generate_{model}": partial(generate, model) for model in dict.fromkeys(case[0] for case in CASES)},
}


def lines() -> Iterator[tuple[Any, ...]]:
    """Rows of the table: key, words, unit, relation and target."""
    for name, words in WORKLOADS.items():
        yield f"new_{name}_step_1_ratio", f"first step of {words} / torch eager's", "", "<=", 2.5
    for name in ("resnet", "gpt2"):
        yield f"new_{name}_peak_ratio", f"peak memory of the first step of {WORKLOADS[name]} / eager's", "", "<=", 1.1
    for kind, words in RAGGED.items():
        yield f"ragged_{kind}_ratio", f"200 ragged batches of {words} / torch eager", "", "<=", 1.5
    for case in CASES:
        key, target = (
            "_".join(("generate", *case)),
            1.0 if case[0] == "large" else {"dynamic": 2.5, "static": 2.0}[case[1]],
        )
        yield f"{key}_ratio", f"generate, {', '.join(case)} / torch eager", "", "<=", target
        yield f"{key}_same", "  calls with the ids expected", "", "=", 6.0


def comparisons() -> Iterator[tuple[Any, ...]]:
    """Rows without targets."""
    for name, words in WORKLOADS.items():
        yield f"new_{name}_step_ms", f"first step of {words} without a program", "ms"
        for i in range(2, 6):
            yield f"new_{name}_step_{i}_ratio", f"  step {i} / torch eager's"
        yield f"new_{name}_peak_mb", "  peak memory of the first step", "MB"
    for kind, words in RAGGED.items():
        yield f"ragged_{kind}_compiles", f"compiles over 200 ragged batches of {words}"
    for case in CASES:
        key = "_".join(("generate", *case))
        yield f"{key}_first_ratio", f"first generate, {', '.join(case)} / torch eager"
        yield f"{key}_compiles", "  its compiles"
        yield f"{key}_later_compiles", "  compiles of five later calls"
