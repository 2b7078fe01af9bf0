"""Checkpoints of `train_llm.py`: folders that transformers loads, with the optimizer's state beside the weights.

A folder is written under another name and then renamed, so one that is there is whole. Split parameters are gathered,
so what two processes saved one may load, and the other way round.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as states

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

if __package__:
    from examples import common
else:
    import common

if TYPE_CHECKING:
    from transformers import LlamaConfig

WEIGHTS = "model.safetensors"
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def latest(folder: Path) -> Path | None:
    """The checkpoint of the most steps."""
    found = sorted(path for path in folder.glob("step-*") if path.suffix != ".part")
    return found[-1] if found else None


def steps_of(path: Path) -> int:
    """How many steps were done when a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Path:
    """Writes a checkpoint; all processes call it, the first one writes.

    Args:
        folder: Where checkpoints are.
        step: How many steps were done.
        model: The model, a transformers one or split from one.
        optimizer: Its optimizer.
        schedule: The learning rate's schedule.
    """
    with torch_xla.debug.new_graphs_expected():  # split parameters are gathered, by a graph for each shape
        weights, state = states.get_state_dict(model, optimizer, options=WHOLE)
    path = folder / f"step-{step:06}"
    if xr.global_ordinal() == 0:
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        model.config.save_pretrained(part)
        weights.pop("lm_head.weight")  # the embedding
        save_file({name: value.contiguous() for name, value in weights.items()}, part / WEIGHTS, {"format": "pt"})
        torch.save({"optimizer": state, "schedule": schedule.state_dict(), "step": step}, part / "training.pt")
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    if xr.world_size() > 1:
        xm.rendezvous(f"saved {step}")
    return path


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> int:
    """Reads the latest checkpoint into a model, an optimizer and a schedule; gives the number of steps done."""
    path = latest(folder)
    if path is None:
        common.refuse(f"there is no checkpoint in {folder}")
    check_shape(path, model.config)
    weights = load_file(path / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    training = torch.load(path / "training.pt", weights_only=True)
    states.set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=training["optimizer"],
        options=states.StateDictOptions(full_state_dict=True),
    )
    schedule.load_state_dict(training["schedule"])
    return training["step"]


def check_shape(path: Path, config: LlamaConfig) -> None:
    """Ends the program where a checkpoint is of a model of another shape."""
    saved = json.loads((path / "config.json").read_text())
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    other = [f"{name} {saved[name]}" for name in names if saved[name] != getattr(config, name)]
    if other:
        own = ", ".join(f"{name} {getattr(config, name)}" for name in names)
        common.refuse(f"the checkpoint {path} is of another shape: {', '.join(other)}; this model has {own}")
