"""Text that every machine has, Python's own documentation strings, as bytes; and a small Llama for them."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "idle_test", "__pycache__"}


def documentation(limit: int | None = None) -> str:
    """The documentation strings of Python's library, in the order of its files.

    Args:
        limit: About how many characters are enough.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    length = 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    found.append(text)
                    length += len(text) + 2
        if limit is not None and length >= limit:
            break
    return "\n\n".join(found)


def encode(text: str) -> Tensor:
    """Text as tokens, one per byte of UTF-8."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def decode(tokens: list[int]) -> str:
    """Tokens as text."""
    return bytes(tokens).decode(errors="replace")


def batches(tokens: Tensor, count: int, length: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Batches of random stretches of the text, (count, length) each, for ever.

    Args:
        tokens: The text.
        count: How many stretches a batch has.
        length: Their length.
        seed: Decides which; a batch depends on it and on its number alone, so a run can be taken up again.
        start: The number of the first batch.
    """
    if len(tokens) <= length:
        raise ValueError(f"got a text of {len(tokens)} bytes, expected more than a sequence of {length}")
    generator = torch.Generator()
    number = start
    while True:
        generator.manual_seed(seed * 1_000_003 + number)
        starts = torch.randint(len(tokens) - length, (count,), generator=generator)
        yield tokens[starts[:, None] + torch.arange(length)]
        number += 1


def config_of(hidden: int, layers: int, heads: int, longest: int) -> LlamaConfig:
    """A Llama over bytes, with half as many heads for keys and values."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )


def build(config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
    """The model with random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(config)
