"""Writes recorded graphs to files."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from torch_xla._core.execute import export as _export
from torch_xla._errors import message

_numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)


def save_tensors_graph(save_dir: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Writes what computes some tensors to a file ``<name>-<thread>-<number>.<format>``.

    Args:
        save_dir: Its folder.
        name: First part of its name; files of one name and thread are numbered.
        tensors: Pending tensors on device xla. ``SAVE_GRAPH_FMT`` is the format: text, dot or hlo.
    """
    form = os.environ.get("SAVE_GRAPH_FMT", "text")
    if form not in ("text", "dot", "hlo"):
        raise RuntimeError(message("graph_saver", f"got SAVE_GRAPH_FMT={form}", expected="text, dot or hlo"))
    text = _export.graph_text(list(tensors), form)
    thread = threading.get_ident()
    path = os.path.join(save_dir, f"{name}-{thread}-{next(_numbers[name, thread])}.{form}")
    with open(path, "w") as file:
        file.write(text)
