"""The engine and the server of examples/: the answers of `generate`, whatever else is answered, and no compiles."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch

from examples import llm_data

pytest.importorskip("fastapi", reason="the server is FastAPI's")

from examples import llm_load, serve_llm
from examples.llm_engine import Engine, Request, draw

LENGTH = 48
WORDS = "The quick brown fox jumps over the lazy dog. " * 2


@pytest.fixture(scope="module")
def served() -> serve_llm.Served:
    return serve_llm.load(serve_llm.parse(["--length", str(LENGTH), "--buckets", "8", "24"]))


@pytest.fixture(scope="module")
def engine(served: serve_llm.Served) -> Iterator[Engine]:
    engine = Engine(serve_llm._copy(served.model).to("xla"), 3, LENGTH, [8, 24])
    engine.warm_up()
    engine.start()
    yield engine
    engine.stop()


def generated(served: serve_llm.Served, tokens: list[int], count: int) -> list[int]:
    prompt = torch.tensor([tokens])
    result = served.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
    )
    return result[0, len(tokens) :].tolist()


def test_ragged_requests_have_the_answers_they_have_alone(
    served: serve_llm.Served, engine: Engine, compiles: Callable[..., AbstractContextManager[Any]]
) -> None:
    choose = random.Random(1)
    prompts = [llm_data.encode(WORDS[: choose.randint(1, 24)]).tolist() for _ in range(8)]
    counts = [choose.randint(1, 12) for _ in prompts]
    with compiles(0):
        asked = [engine.submit(Request(p, n)) for p, n in zip(prompts, counts, strict=True)]
        results = [request.answer.result(timeout=60) for request in asked]
    assert results == [generated(served, p, n) for p, n in zip(prompts, counts, strict=True)]


def test_what_stops_an_answer_is_not_in_it(served: serve_llm.Served, engine: Engine) -> None:
    prompt = llm_data.encode("abc").tolist()
    whole = engine.submit(Request(prompt, 6)).answer.result(timeout=60)
    stop = whole[-1]
    result = engine.submit(Request(prompt, 6, stop=frozenset([stop]))).answer.result(timeout=60)
    assert result == whole[: whole.index(stop)]


def test_what_is_drawn_follows_temperature_and_top_p() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9, -1.0]]).repeat(400, 1).to("xla")
    likely = draw(logits, torch.tensor([[1.0, 0.6]]).repeat(400, 1).to("xla")).cpu()
    assert set(likely.tolist()) == {1, 2}
    assert set(draw(logits, torch.tensor([[0.0, 1.0]]).repeat(400, 1).to("xla")).tolist()) == {1}
    wild = draw(logits, torch.tensor([[50.0, 1.0]]).repeat(400, 1).to("xla"))
    assert set(wild.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("prompt", "limit"), [([], 4), ([1] * 25, 4)])
def test_prompts_that_have_no_bucket_are_refused(engine: Engine, prompt: list[int], limit: int) -> None:
    with pytest.raises(ValueError, match="expected at"):
        engine.submit(Request(prompt, limit))


@pytest.fixture(scope="module")
def address(served: serve_llm.Served, engine: Engine) -> Iterator[str]:
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(serve_llm.application(served, engine), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


def test_over_http(served: serve_llm.Served, address: str) -> None:
    with urlopen(f"{address}/models") as reply:
        assert json.load(reply)["data"][0]["id"] == "random"
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    result = llm_load.post(f"{address}/completions", body)
    expected = served.decode(generated(served, list(b"Hello"), 5))
    assert result["choices"][0] == {"index": 0, "text": expected, "finish_reason": "length"}
    assert result["usage"] == {"prompt_tokens": 5, "completion_tokens": 5}
    with pytest.raises(HTTPError) as refused:
        llm_load.post(f"{address}/completions", {**body, "prompt": "x" * 25})
    assert refused.value.code == 400
    assert "the largest bucket" in json.load(refused.value)["detail"]


def test_over_http_piece_by_piece(address: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0, "stream": True}
    with llm_load.opened(f"{address}/completions", body) as reply:
        lines = [line.removeprefix(b"data: ").strip() for line in reply if line.strip()]
    assert lines[-1] == b"[DONE]"
    assert len([json.loads(line) for line in lines[:-1]]) == 3


def test_starting_refuses_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SystemExit, match="choose another with --port"):
            serve_llm.check_port(other.getsockname()[1])
    with pytest.raises(SystemExit, match="expected at most --length 16"):
        serve_llm.parse(["--length", "16", "--buckets", "32"])
    with pytest.raises(SystemExit, match="/nowhere/at-all is no folder"):
        serve_llm.load(serve_llm.parse(["--model", "/nowhere/at-all"]))
