"""Raises what PyTorch's CPU kernels say of the values of a graph (``XLA_CHECK_VALUES=1``).

A program never raises because of a value: an index beyond a tensor, an integer division by 0 (docs/caveats.md). With
the check graphs run op by op, and what a CPU kernel says of values that it refuses is raised.
"""

from __future__ import annotations

import torch

from torch_xla import _bindings
from torch_xla._core.graph.graph import Node
from torch_xla._errors import GraphFailure


def check(running: _bindings.OpByOpRun | None, node: Node, tensors: list[torch.Tensor]) -> None:
    """Looks at the operator that a run has come to, whose kernel did not compute it.

    Args:
        running: The run; None where nothing is checked, in a run that gives its values to nobody.
        node: The operator.
        tensors: A CPU tensor per input.

    Raises:
        GraphFailure: The kernel refuses these values, and would take others.
    """
    if running is None:
        return
    refusal = _refusal(running, tensors)
    # What is said of all values is about types or layouts, of which XLA takes more.
    others = ([like(t) for t in tensors] for like in (torch.zeros_like, torch.ones_like))
    if refusal is None or all(_same(refusal, _refusal(running, values)) for values in others):
        return
    where = f"\n  recorded at {node.frame}" if node.frame else ""
    refusal.args = (f"{refusal}{where}",)
    raise GraphFailure(refusal, (running.position,), final=True)


def _same(refusal: Exception, other: Exception | None) -> bool:
    return type(other) is type(refusal) and str(other) == str(refusal)


def _refusal(running: _bindings.OpByOpRun, tensors: list[torch.Tensor]) -> Exception | None:
    try:
        running.raise_as_kernel(tensors)
    except Exception as error:
        return error
    return None
