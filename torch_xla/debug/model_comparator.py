"""Compares two runs of a model tensor by tensor.

The model calls `save` at points of interest; each run saves to a folder of its own, and `compare` tells where the
values part. From a shell: ``python -m torch_xla.debug.model_comparator FOLDER1 FOLDER2``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path

import torch

from torch_xla import runtime
from torch_xla._errors import message

_folder: str | None = None
_counts: Counter[str] = Counter()


def configure(save_dir: str | None) -> None:
    """Chooses the folder that `save` writes to, and starts to number anew.

    Args:
        save_dir: The folder; None for that of the environment variable ``MODELCMP_SAVEDIR``, if set.
    """
    global _folder
    _folder = save_dir
    _counts.clear()


def save(name: str | None, tensor: torch.Tensor, step: int | None = None) -> torch.Tensor:
    """Saves a tensor's values as ``name.0``, ``name.1``, …; without a folder it does nothing.

    Args:
        name: Name of the point; the caller's file and line by default.
        tensor: The tensor.
        step: Training step; each has a folder.

    Returns:
        The same tensor.
    """
    folder = _folder or os.environ.get("MODELCMP_SAVEDIR")
    if folder is None:
        return tensor
    values = tensor.detach().cpu()
    if runtime.global_ordinal() != 0:
        return tensor
    path = Path(folder)
    if step is not None:
        path = path / f"step-{step}"
        path.mkdir(exist_ok=True)
    if name is None:
        frame = sys._getframe(1)
        name = f"{os.path.basename(frame.f_code.co_filename)}.l{frame.f_lineno}"
    point = str(path / name)
    torch.save(values, f"{point}.{_counts[point]}")
    _counts[point] += 1
    return tensor


def compare_tensors(
    tensor1: torch.Tensor, tensor2: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, max_diffs: int = 25
) -> str:
    """The elements in which two tensors differ by more than both tolerances, largest difference first.

    Args:
        tensor1: A tensor.
        tensor2: Another.
        rtol: Tolerance relative to the greater of both values.
        atol: Absolute tolerance.
        max_diffs: How many differences are listed.
    """
    if tensor1.shape != tensor2.shape:
        return f"different shapes: {list(tensor1.shape)} and {list(tensor2.shape)}\n"
    kind = torch.complex128 if tensor1.is_complex() or tensor2.is_complex() else torch.float64
    a, b = tensor1.to(kind), tensor2.to(kind)
    error = (a - b).abs()
    error = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, error.nan_to_num(nan=torch.inf, posinf=torch.inf))
    allowed = (torch.maximum(a.abs(), b.abs()) * rtol).clamp(min=atol).nan_to_num(nan=atol)
    places = (error > allowed).nonzero()
    order = error[error > allowed].argsort(descending=True)
    lines = []
    for place in places[order[:max_diffs]].tolist():
        index = tuple(place)
        lines.append(f"{place}: {tensor1[index]} and {tensor2[index]}, error {error[index]:g}\n")
    if len(places) > max_diffs:
        lines.append(f"… and {len(places) - max_diffs} more\n")
    return "".join(lines)


def tensor_file_compare(
    path1: str | os.PathLike[str],
    path2: str | os.PathLike[str],
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """`compare_tensors` of two saved files, with a heading.

    Args:
        path1: A file that `save` wrote.
        path2: Another.
        rtol: See `compare_tensors`.
        atol: See `compare_tensors`.
        max_diffs: See `compare_tensors`.
    """
    report = compare_tensors(torch.load(path1), torch.load(path2), rtol, atol, max_diffs)
    if not report:
        return ""
    return f'saved tensor "{path1}" changed\n' + "".join(f"  {line}\n" for line in report.splitlines())


def _saved(folder: str | os.PathLike[str]) -> set[str]:
    if not Path(folder).is_dir():
        raise FileNotFoundError(message("model_comparator", f"got {folder}", expected="a folder that `save` wrote to"))
    paths = (p for p in Path(folder).rglob("*") if p.is_file() and re.fullmatch(r".*\.\d+", p.name))
    return {str(p.relative_to(folder)) for p in paths}


def compare(
    save_dir1: str | os.PathLike[str],
    save_dir2: str | os.PathLike[str],
    rtol: float = 1e-05,
    atol: float = 1e-08,
    max_diffs: int = 25,
) -> str:
    """The differences between two folders of saved tensors.

    Args:
        save_dir1: A folder.
        save_dir2: Another.
        rtol: See `compare_tensors`.
        atol: See `compare_tensors`.
        max_diffs: See `compare_tensors`.
    """
    one, two = _saved(save_dir1), _saved(save_dir2)
    report = [f"{path} is not in {save_dir2}\n" for path in sorted(one - two)]
    report += [f"{path} is not in {save_dir1}\n" for path in sorted(two - one)]
    for path in sorted(one & two):
        report.append(tensor_file_compare(Path(save_dir1) / path, Path(save_dir2) / path, rtol, atol, max_diffs))
    return "".join(report)


def main() -> int:
    """The command line; 1 if something differs."""
    parser = argparse.ArgumentParser(description="Compares two folders of saved tensors.")
    parser.add_argument("--rtol", type=float, default=1e-05)
    parser.add_argument("--atol", type=float, default=1e-08)
    parser.add_argument("--max_diffs", type=int, default=25)
    parser.add_argument("savedir1")
    parser.add_argument("savedir2")
    options = parser.parse_args()
    report = compare(options.savedir1, options.savedir2, options.rtol, options.atol, options.max_diffs)
    if report:
        print(report, end="", file=sys.stderr)
    return 1 if report else 0


if __name__ == "__main__":
    sys.exit(main())
