"""Putting the shards of a model that was trained with FSDP together, those of torch_xla 2 included."""

from __future__ import annotations

import glob
import math
from typing import Any

import torch

from torch_xla import _files
from torch_xla._errors import message

# What wrappers put into the names of parameters.
WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"

State = dict[str, torch.Tensor]


def without_wrappers(name: str) -> str:
    """The name that a parameter has in the module without wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _consolidated(name: str, shards: list[State], shard_info: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """Name and value of one parameter, from its shards."""
    parts = name.split(".")
    split = next((k for k, part in enumerate(parts) if part.startswith(_SHARD)), None)
    if split is None:
        return name, shards[0][name]
    prefix = ".".join(parts[:split])
    info = shard_info[prefix][".".join(parts[split:])]
    value, size = torch.cat([shard[name] for shard in shards]), info["_orig_size"]
    # Shards are padded to equal lengths: rows of the parameter, or elements where it was flattened.
    value = value[: math.prod(size)].view(tuple(size)) if value.dim() == 1 else value[: size[0]]
    return _join(prefix, info["_orig_name"]), value


def _unflatten(name: str, value: torch.Tensor, flatten_info: dict[str, Any]) -> State:
    """The parameters that a flat one holds."""
    names, shapes, lengths = flatten_info[name]
    prefix = name.rpartition(".")[0]
    pieces = value.split(list(lengths))
    return {_join(prefix, n): piece.view(s) for n, piece, s in zip(names, pieces, shapes, strict=True)}


def consolidate_sharded_state_dicts(state_dict_list: list[State], shard_metadata: dict[str, Any]) -> State:
    """The state of the model without wrappers.

    Args:
        state_dict_list: The state of each process, by rank.
        shard_metadata: What ``get_shard_metadata`` returned in any of them.
    """
    expected = shard_metadata["world_size"]
    if len(state_dict_list) != expected:
        raise AssertionError(message("fsdp", f"got {len(state_dict_list)} shards", expected=f"{expected}"))
    dtypes = shard_metadata.get("buffer_info", {})
    full: State = {}
    for name in state_dict_list[0]:
        full_name, value = _consolidated(name, state_dict_list, shard_metadata["shard_info"])
        pieces = _unflatten(full_name, value, shard_metadata["flatten_info"]) if _FLAT in full_name else None
        full.update(pieces or {full_name: value.to(dtypes[name]["_orig_dtype"]) if name in dtypes else value})
    return {without_wrappers(name): value for name, value in full.items()}


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True
) -> tuple[State, str | None]:
    """Reads the files of all processes and saves the model without wrappers.

    Args:
        ckpt_prefix: First part of the files' paths.
        ckpt_suffix: Pattern for the rest. Each file holds a dict with ``model``, the state of the wrapped model, and
            ``shard_metadata``.
        save_path: Where to save ``{"model": state}``; ``<ckpt_prefix>_consolidated.pth`` by default.
        save_model: Whether to save at all.

    Returns:
        The state, and the path it was saved to or None.
    """
    paths = glob.glob(ckpt_prefix + ckpt_suffix)
    if not paths:
        raise AssertionError(message("fsdp", f"Cannot find any files matching {ckpt_prefix + ckpt_suffix}."))
    # `weights_only` would refuse the plain sizes and types of the metadata of older files.
    files = [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
    files.sort(key=lambda file: file["shard_metadata"]["rank"])
    ranks = [file["shard_metadata"]["rank"] for file in files]
    expected = files[0]["shard_metadata"]["world_size"]
    if ranks != list(range(expected)):
        raise AssertionError(message("fsdp", f"got files of ranks {ranks}", expected=f"each of {expected} once"))
    full = consolidate_sharded_state_dicts([file["model"] for file in files], files[0]["shard_metadata"])
    if not save_model:
        return full, None
    target = save_path or f"{ckpt_prefix}_consolidated.pth"
    with _files.replacing(target) as path:
        torch.save({"model": full}, path)
    return full, target
