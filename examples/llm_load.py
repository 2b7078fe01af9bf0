"""The load test of `serve_llm.py`: many ragged requests at once, and the CPU's ``generate`` for comparison."""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import quantiles
from typing import Any
from urllib.request import Request, urlopen

import torch

if __package__:
    from examples import common, llm_data
else:
    import common
    import llm_data

COMPARED = 10  # requests that the CPU answers too


@dataclass(frozen=True)
class Asked:
    """A request of the test.

    Attributes:
        prompt: The text.
        limit: Tokens of the answer.
        temperature: Every other one draws, the rest takes the likeliest.
    """

    prompt: str
    limit: int
    temperature: float


def requests(count: int, longest: int, length: int) -> list[Asked]:
    """Requests whose prompts are stretches of text of many lengths.

    Args:
        count: How many.
        longest: Bytes of the longest prompt.
        length: Tokens that prompt and answer may have together.
    """
    choose = random.Random(0)
    text = llm_data.documentation(limit=100_000).encode("ascii", "replace").decode()
    found = []
    for number in range(count):
        size = choose.randint(4, longest)
        start = choose.randrange(len(text) - size)
        limit = min(choose.randint(8, 64), length - size)
        found.append(Asked(text[start : start + size], limit, 0.8 * (number % 2)))
    return [asked for asked in found if asked.limit > 0]


def run(server: Any, served: Any, engine: Any, options: argparse.Namespace) -> None:
    """Starts the server, sends the requests, prints what came of it."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
        if not thread.is_alive():
            common.refuse("the server did not start")
    asked = requests(options.load_test, min(engine.buckets[-1], engine.length - 8), engine.length)
    graphs, steps = common.compiles(), engine.steps
    address = f"http://127.0.0.1:{options.port}/v1/completions"

    def send(one: Asked) -> tuple[float, int, str]:
        began = time.perf_counter()
        found = post(address, {"prompt": one.prompt, "max_tokens": one.limit, "temperature": one.temperature})
        return time.perf_counter() - began, found["usage"]["completion_tokens"], found["choices"][0]["text"]

    began = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        replies = list(pool.map(send, asked))
    seconds = time.perf_counter() - began
    server.should_exit = True
    thread.join()
    count = sum(tokens for _, tokens, _ in replies)
    print(
        f"{len(replies)} requests, {options.clients} at a time: {count} tokens in {seconds:.1f} s, "
        f"{count / seconds:.0f} tokens/s, {engine.steps - steps} steps, "
        f"{common.graphs(common.compiles() - graphs)} compiled"
    )
    print(f"latency of a request: {percentiles([latency for latency, _, _ in replies])}")
    compare(served, asked, [text for _, _, text in replies])


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a server answers to a request in JSON."""
    with opened(address, body) as reply:
        return json.load(reply)


def opened(address: str, body: dict[str, Any]) -> Any:
    """A server's answer, to be read."""
    return urlopen(Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=600)


def percentiles(seconds: list[float]) -> str:
    """The median and the tails in words."""
    cuts = quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
    return ", ".join(f"p{p} {cuts[p - 1] * 1e3:.0f} ms" for p in (50, 90, 99))


@torch.no_grad()
def compare(served: Any, asked: list[Asked], replies: list[str]) -> None:
    """Answers some of the requests one by one with PyTorch on the CPU; greedy answers must be the same."""
    times, count, same, greedy = [], 0, 0, 0
    for one, reply in list(zip(asked, replies, strict=True))[:COMPARED]:
        tokens = torch.tensor([served.encode(one.prompt)])
        began = time.perf_counter()
        found = served.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=one.limit,
            min_new_tokens=None if served.stop else one.limit,
            do_sample=one.temperature > 0,
            temperature=one.temperature or None,
            top_k=None,
            top_p=None,
            pad_token_id=0,
            use_cache=True,
        )
        times.append(time.perf_counter() - began)
        own = found[0, tokens.shape[1] :].tolist()
        count += len(own)
        if not one.temperature:
            greedy += 1
            same += served.decode(own) == reply
    print(f"generate with PyTorch on the CPU, one by one: {count / sum(times):.0f} tokens/s, {percentiles(times)}")
    print(f"{same} of {greedy} greedy answers are the same")
