"""Whole models over a mesh: their losses are those of one device, and each is compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

VOCABULARY, LENGTH, ROWS = 64, 8, 8
FLAT = xs.Mesh(np.arange(8), (8, 1), ("fsdp", "tensor"))
GRID = xs.Mesh(np.arange(8), (4, 2), ("fsdp", "tensor"))
LAST_IN = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "c_fc.weight", "c_attn.weight")

Split = Callable[[PreTrainedModel], torch.nn.Module]


def model_of(family: str, layers: int = 2) -> PreTrainedModel:
    """Random weights, the same at each call."""
    torch.manual_seed(4)
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    if family == "gpt2":
        sizes = {"n_positions": 32, "n_embd": 32, "n_layer": layers, "n_head": 4}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **ends))
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **ends,
    }  # fmt: skip
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **options))
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **options))


def fully(model: PreTrainedModel) -> torch.nn.Module:
    """All parameters in their longest dimension, layers by themselves."""

    def logits(output: Any, mesh: xs.Mesh) -> None:
        first = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
        xs.mark_sharding(first, mesh, ("fsdp", None, None))

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return SpmdFullyShardedDataParallel(model, mesh=GRID, shard_output=logits, auto_wrap_policy=policy)


def by_hand(model: PreTrainedModel) -> torch.nn.Module:
    """Matrices over both axes, experts over one."""
    model = model.to("xla")
    for name, param in model.named_parameters():
        if param.dim() == 3:
            xs.mark_sharding(param, GRID, ("fsdp", None, "tensor"))
        if param.dim() == 2:
            xs.mark_sharding(param, GRID, ("fsdp", "tensor") if name.endswith(LAST_IN) else ("tensor", "fsdp"))
    return model


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(count)]


def train(model: torch.nn.Module, device: str, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for tokens in batches(steps):
        if device == "xla":
            tokens = tokens.to("xla")
            xs.mark_sharding(tokens, GRID, ("fsdp", None))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        torch_xla.sync()
    return losses


def agrees(family: str, split: Split, compiles: Any, layers: int = 1, steps: int = 3) -> torch.nn.Module:
    expected = train(model_of(family, layers), "cpu", steps)
    model = split(model_of(family, layers))
    with compiles(1):
        losses = train(model, "xla", steps)
    torch.testing.assert_close([x.cpu() for x in losses], expected, rtol=1e-3, atol=1e-4)
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_matrices_over_two_axes(family, compiles):
    model = agrees(family, by_hand, compiles)
    parts = [xs.XLAShardedTensor(p).local_shards[0].data for p in model.parameters() if p.dim() > 1]
    whole = [p for p in model.parameters() if p.dim() > 1]
    assert sum(p.numel() for p in whole) == 8 * sum(p.numel() for p in parts)


def test_fully_sharded(compiles):
    model = agrees("llama", fully, compiles, layers=2)
    layers = [module for module in model.modules() if isinstance(module, SpmdFullyShardedDataParallel)]
    assert len(layers) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("split", [by_hand, fully])
def test_eight_layers(split, compiles):
    agrees("llama", split, compiles, layers=8, steps=5)


class Rows(torch.utils.data.Dataset):
    """Sequences to learn."""

    def __init__(self, steps: int) -> None:
        self.rows = torch.cat(batches(steps))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


class WithOptimizer(Trainer):
    """transformers 5.23 puts off making an optimizer, and then makes none for models that it wrapped for xla."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.optimizer is None:
            self.create_optimizer()
        return super().create_scheduler(num_training_steps, optimizer)


@pytest.mark.compiled("transformers reads positions and losses, for which nothing need be compiled", reads=False)
def test_trainer(tmp_path: Path, compiles: Any) -> None:
    """transformers' own switch, with checkpointed layers, as its users write it."""
    steps = 4
    config = {
        "xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=ROWS, max_steps=steps, learning_rate=1e-2,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, dataloader_drop_last=True, fsdp=True,
        fsdp_config=config, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = WithOptimizer(model=model_of("llama"), args=arguments, train_dataset=Rows(steps))
    with compiles(3):  # the step, the loss that is logged, and its new start
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weight = trainer.model.model.layers[0].self_attn.q_proj.weight
    assert _XLAC._get_xla_sharding_spec(weight).startswith("{devices=[8,1]")
    expected = [float(loss) for loss in train(model_of("llama"), "cpu", steps)]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
