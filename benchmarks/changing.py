"""Programs whose graphs are new: first steps, ragged batches and `generate`, as ratios to torch eager.

Graphs run operator by operator until they repeat (`XLA_HOST_COMPUTE=new`). Each side has a process of its own, in
turns, and one thread for operators: with more, torch eager waits at each of OpenMP's barriers for whoever else uses the
machine. torch.compile finds on the disk, from its second turn on, what it compiled in the first.
"""

from __future__ import annotations

import operator
import tempfile
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
DECODED = {"llama": "a Llama of 2 layers", "large": "a Llama of 8 layers, 512 wide"}
SIDES = ("xla", "cpu")


def _sides(case: tuple[str, str, str]) -> tuple[str, ...]:
    """torch.compile takes part where the cache is static, of two models: a new one compiles for a minute."""
    return (*SIDES, "inductor") if case[0] in ("llama", "large") and case[1] == "static" else SIDES


def _run(*arguments: str, hot: bool = True, folder: str = "") -> dict[str, Any]:
    """What a fresh process measures; torch.compile keeps in the folder what it compiled."""
    computed = "new" if hot else "reads"
    settings = {"XLA_HOST_COMPUTE": computed, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
    result: dict[str, Any] = measured("changing_runs", *arguments, settings=settings)
    return result


def _rounds(*arguments: str, sides: tuple[str, ...] = SIDES) -> list[dict[str, dict[str, Any]]]:
    """What the sides do, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        return [{side: _run(*arguments, side, folder=folder) for side in sides} for _ in range(ROUNDS)]


def _ratio(rounds: list[dict[str, Any]], of: Callable[[Any], float], best: bool = False) -> float:
    """What torch_xla takes ÷ what torch eager takes, or ÷ the better of all others."""
    return median(
        of(turn["xla"]) / min(of(turn[side]) for side in (turn.keys() - {"xla"} if best else ["cpu"]))
        for turn in rounds
    )


def first_steps(name: str) -> Figures:
    """Each of the first steps ÷ torch eager's, and the memory that the first one takes ÷ eager's."""
    rounds = _rounds("steps", name)
    ours = [turn["xla"] for turn in rounds]
    return {
        f"new_{name}_peak_ratio": _ratio(rounds, lambda side: side["peak"]),
        f"new_{name}_peak_mb": median(side["peak"] for side in ours),
        **{
            f"new_{name}_step_{i + 1}_ratio": _ratio(rounds, lambda side, i=i: side["seconds"][i])
            for i in range(len(ours[0]["seconds"]))
        },
        f"new_{name}_step_ms": median(side["seconds"][0] for side in ours) * 1e3,
    }


def ragged(kind: str) -> Figures:
    """Seconds of training on batches of ever other lengths ÷ torch eager's, and how many graphs were compiled."""
    rounds, key = _rounds("ragged", kind, sides=(*SIDES, "inductor")), f"ragged_{kind}"
    return {
        f"{key}_ratio": _ratio(rounds, lambda side: side["seconds"]),
        f"{key}_best_ratio": _ratio(rounds, lambda side: side["seconds"], best=True),
        f"{key}_compiles": rounds[0]["xla"]["compiles"],
    }


def generate(model: str) -> Figures:
    """First and later calls ÷ torch eager's, compiles, and in how many the ids are those expected.

    Draws are those of the same seed where every graph is compiled; all else is what the CPU gives.
    """
    figures: Figures = {}
    for case in CASES:
        if case[0] != model:
            continue
        rounds, key = _rounds("generate", *case, sides=_sides(case)), "_".join(("generate", *case))
        ours, expected = rounds[0]["xla"], rounds[0]["cpu"]["ids"]
        ids = [turn["xla"]["ids"] for turn in rounds]
        if case[2] == "sample":
            drawn = _run("generate", *case, "xla", str(DRAWN), hot=False)["ids"][0][0]
            ids = [[[text[0][: len(drawn)]] for text in texts] for texts in ids]
            expected = [[drawn]] * len(expected)
        figures |= {
            f"{key}_first_ratio": _ratio(rounds, lambda side: side["ms"][0]),
            f"{key}_ratio": _ratio(rounds, _later),
            f"{key}_same": min(sum(map(operator.eq, texts, expected)) for texts in ids),
            f"{key}_compiles": ours["compiles"][0],
            f"{key}_later_compiles": sum(ours["compiles"][1:]),
            f"{key}_ms": median(_later(turn["xla"]) for turn in rounds),
        }
        if "inductor" in rounds[0]:
            figures[f"{key}_best_ratio"] = _ratio(rounds, _later, best=True)
    return figures


def decode(model: str) -> Figures:
    """A token of a loop with a static cache, which torch_xla replays, ÷ torch eager's, ÷ the better of the others'."""
    rounds = _rounds("decode", model, sides=(*SIDES, "inductor"))
    return {
        f"decode_{model}_ratio": _ratio(rounds, _later),
        f"decode_{model}_best_ratio": _ratio(rounds, _later, best=True),
        f"decode_{model}_ms": median(_later(turn["xla"]) for turn in rounds),
        f"decode_{model}_same": min(sum(map(operator.eq, turn["xla"]["ids"], turn["cpu"]["ids"])) for turn in rounds),
    }


def _later(side: dict[str, Any]) -> float:
    """Milliseconds a token of the calls after the first."""
    return median(side["ms"][1:])


MEASURES: dict[str, Callable[[], Figures]] = {
    **{f"new_{name}": partial(first_steps, name) for name in WORKLOADS},
    **{f"ragged_{kind}": partial(ragged, kind) for kind in RAGGED},
    **{f"generate_{model}": partial(generate, model) for model in dict.fromkeys(case[0] for case in CASES)},
    **{f"decode_{model}": partial(decode, model) for model in DECODED},
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
        key = "_".join(("generate", *case))
        target = 1.0 if case[0] == "large" else 1.3
        yield f"{key}_ratio", f"generate, {', '.join(case)} / torch eager", "", "<=", target
        yield f"{key}_same", "  calls with the ids expected", "", "=", 6.0
    for model, words in DECODED.items():
        yield f"decode_{model}_best_ratio", f"replay of a token of {words} / the better peer", "", "<=", 1.0
        yield f"decode_{model}_same", "  texts with the ids expected", "", "=", 6.0


def comparisons() -> Iterator[tuple[Any, ...]]:
    """Rows without targets."""
    for name, words in WORKLOADS.items():
        yield f"new_{name}_step_ms", f"first step of {words} without a program", "ms"
        for i in range(2, 6):
            yield f"new_{name}_step_{i}_ratio", f"  step {i} / torch eager's"
        yield f"new_{name}_peak_mb", "  peak memory of the first step", "MB"
    for kind, words in RAGGED.items():
        yield f"ragged_{kind}_best_ratio", f"200 ragged batches of {words} / the better of eager and torch.compile"
        yield f"ragged_{kind}_compiles", f"compiles over 200 ragged batches of {words}"
    for case in CASES:
        key = "_".join(("generate", *case))
        yield f"{key}_ms", f"a token of generate, {', '.join(case)}", "ms"
        if "inductor" in _sides(case):
            yield f"{key}_best_ratio", f"generate, {', '.join(case)} / the better of eager and torch.compile"
        yield f"{key}_first_ratio", f"first generate, {', '.join(case)} / torch eager"
        yield f"{key}_compiles", "  its compiles"
        yield f"{key}_later_compiles", "  compiles of five later calls"
    for model, words in DECODED.items():
        yield f"decode_{model}_ms", f"replay of a token of {words}", "ms"
        yield f"decode_{model}_ratio", "  / torch eager"
