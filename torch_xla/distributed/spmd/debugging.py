"""Splits as tables on a terminal; they need the package ``rich``."""

from __future__ import annotations

import re
from typing import Any

import torch

from torch_xla import runtime
from torch_xla._errors import message
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor


def visualize_sharding(
    sharding: str, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80
) -> Any:
    """Prints which devices have which part of the first two dimensions of a tensor, and gives the table.

    Args:
        sharding: The split in XLA's notation.
        use_color: Whether lines between the parts may be left out where the terminal has colors.
        scale: Accepted for compatibility.
        min_width: Accepted for compatibility.
        max_width: Width of the table in characters.

    Raises:
        ValueError: That is no split, or the package is missing.
    """
    try:
        import rich.align
        import rich.box
        import rich.console
        import rich.padding
        import rich.style
        import rich.table
    except ImportError as error:
        raise ValueError(
            message("spmd", "`visualize_sharding` requires `rich` to be installed", do="pip install rich")
        ) from error
    print(f"Visualizing {sharding} (showing up to the first two dimensions)")
    console = rich.console.Console(width=max_width)
    plain = not (use_color and console.color_system is not None)
    table = rich.table.Table(
        show_header=False,
        show_lines=plain,
        padding=0,
        highlight=plain,
        pad_edge=False,
        box=rich.box.SQUARE if plain else None,
    )
    style = rich.style.Style()
    for row in _cells(sharding):
        cells = [rich.align.Align(f"{runtime.device_type()} {cell}", "center", vertical="middle") for cell in row]
        table.add_row(*(rich.padding.Padding(cell, (1, 1, 1, 1), style=style) for cell in cells))
    console.print(table, end="\n\n")
    return table


def _cells(sharding: str) -> list[list[str]]:
    """The devices of each part, by rows and columns."""
    if sharding in ("", "{replicated}"):
        return [[str(list(range(runtime.global_runtime_device_count())))]]
    match = re.fullmatch(r"\{devices=\[([\d,]+)\]([\d,]+)( last_tile_dim_replicate)?\}", sharding)
    if match is None:
        raise ValueError(message("spmd", f"got {sharding!r}", expected="a sharding such as '{devices=[2,2]0,1,2,3}'"))
    dims = [int(n) for n in match[1].split(",")]
    devices = [int(n) for n in match[2].split(",")]
    copies = dims.pop() if match[3] else 1
    columns = dims[1] if len(dims) > 1 else 1
    depth = copies * max(len(devices) // (copies * dims[0] * columns), 1)
    parts = [devices[i : i + depth] for i in range(0, len(devices), depth)]
    names = [str(part if len(part) > 1 else part[0]) for part in parts]
    return [names[i : i + columns] for i in range(0, len(names), columns)]


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """A tensor's sharding as text, device by device."""
    return XLAShardedTensor(t).sharding_spec


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> Any:
    """`visualize_sharding` of a tensor's split.

    Args:
        t: The tensor.
        **kwargs: See `visualize_sharding`.
    """
    return visualize_sharding(construct_v1_sharding_str(t), **kwargs)
