"""Serves a language model over HTTP, as OpenAI's completions do, with continuous batching on device xla.

Without ``--model`` it serves what `train_llm.py` has trained and saved, ``--checkpoint``, or a small random one. All
graphs are compiled before the port opens. ``--load-test N`` sends N requests of ragged lengths to itself and prints
tokens per second, latencies, and how long ``generate`` takes for some of them with PyTorch on the CPU.

Examples::

    python examples/serve_llm.py --checkpoint demo-output/llm --port 8000
    curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "Return the"}'
    python examples/serve_llm.py --checkpoint demo-output/llm --load-test 200
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from torch import nn

import torch_xla

if __package__:
    from examples import common, llm_checkpoint, llm_data
    from examples.llm_engine import Engine, Request
else:
    import common
    import llm_checkpoint
    import llm_data
    from llm_engine import Engine, Request


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal model of transformers: a folder, or a name if there is a network")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints of train_llm.py")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--slots", type=common.positive, default=8, help="requests that are answered at a time")
    parser.add_argument("--length", type=common.positive, default=256, help="longest prompt and answer together")
    parser.add_argument(
        "--buckets", type=common.positive, nargs="+", default=[32, 64, 128], help="lengths prompts are padded to"
    )
    parser.add_argument(
        "--load-test", type=common.positive, metavar="N", help="send N requests to itself, report, and end"
    )
    parser.add_argument("--clients", type=common.positive, default=16, help="how many of them at a time")
    options = parser.parse_args(arguments)
    if max(options.buckets) > options.length:
        common.refuse(f"got a bucket of {max(options.buckets)}, expected at most --length {options.length}")
    return options


@dataclass(frozen=True)
class Served:
    """A model with what turns text into its tokens and back.

    Attributes:
        name: What it is called.
        model: The model, on the CPU.
        encode: Text to tokens.
        decode: Tokens to text.
        stop: Tokens that end an answer.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop: frozenset[int]


def load(options: argparse.Namespace) -> Served:
    """The model that the options name, or a small random one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if options.model is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            model = AutoModelForCausalLM.from_pretrained(options.model)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            common.refuse(f"{options.model} is no folder of a model and cannot be fetched ({reason}); give a folder")
        stop = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        return Served(options.model, model, tokenizer.encode, tokenizer.decode, stop)
    name = "random"
    model = llm_data.build(llm_data.config_of(64, 2, 4, options.length))
    if options.checkpoint is not None:
        path = llm_checkpoint.latest(options.checkpoint)
        if path is None:
            common.refuse(f"there is no checkpoint in {options.checkpoint}; make one with train_llm.py")
        name, model = path.name, AutoModelForCausalLM.from_pretrained(path)
    return Served(name, model, lambda text: llm_data.encode(text).tolist(), llm_data.decode, frozenset())


class Completion(BaseModel):
    """What a client asks for; the names are OpenAI's."""

    prompt: str
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    model: str | None = None


def application(served: Served, engine: Engine) -> FastAPI:
    """The HTTP endpoints."""
    app = FastAPI(title="torch_xla")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": served.name, "object": "model"}]}

    @app.post("/v1/completions")
    async def complete(asked: Completion) -> Any:
        tokens = served.encode(asked.prompt)
        request = Request(tokens, asked.max_tokens, asked.temperature, asked.top_p, served.stop)
        try:
            engine.submit(request)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if asked.stream:
            return StreamingResponse(_pieces(request), media_type="text/event-stream")
        found = await asyncio.wrap_future(request.answer)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(found)}
        return {**_choice(served.decode(found), "length" if len(found) >= request.limit else "stop"), "usage": usage}

    def _choice(text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": reason}
        return {"object": "text_completion", "model": served.name, "created": int(time.time()), "choices": [choice]}

    async def _pieces(request: Request) -> AsyncIterator[str]:
        while (token := await asyncio.to_thread(request.pieces.get)) is not None:
            yield f"data: {json.dumps(_choice(served.decode([token]), None))}\n\n"
        yield "data: [DONE]\n\n"

    return app


def check_port(port: int) -> None:
    """Ends the program if another one listens at the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            common.refuse(f"port {port} cannot be used ({reason}); choose another with --port")


def main() -> int:
    """Loads, warms up, serves."""
    import uvicorn

    options = parse()
    check_port(options.port)
    served = load(options)
    longest = getattr(served.model.config, "max_position_embeddings", options.length)
    if options.length > longest:
        common.refuse(f"got --length {options.length}, expected at most {longest}, which the model was made for")
    began = time.perf_counter()
    model = served.model.to("xla") if options.load_test is None else _copy(served.model).to("xla")
    engine = Engine(model, options.slots, options.length, options.buckets)
    engine.warm_up()
    print(
        f"{served.name}: {common.parameters_of(model):,} parameters on {torch_xla.device()}, "
        f"{common.graphs(common.compiles())} for buckets {engine.buckets} and {engine.slots} slots, "
        f"ready after {time.perf_counter() - began:.1f} s"
    )
    engine.start()
    server = uvicorn.Server(uvicorn.Config(application(served, engine), port=options.port, log_level="warning"))
    if options.load_test is None:
        print(f"http://127.0.0.1:{options.port}/v1/completions", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # the server has ended then, and raises it once more
            server.run()
    else:
        if __package__:
            from examples import llm_load
        else:
            import llm_load
        llm_load.run(server, served, engine, options)
    engine.stop()
    return 0


def _copy(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
