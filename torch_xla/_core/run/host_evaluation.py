"""Very small graphs behind a value that is read, such as ``timesteps[i].item()`` or a mask check: computed on the host.

Reading a value should cost a read, not a compile of its own. The recorder says which graphs are small enough
(`Graph.fits_host`); PyTorch's CPU kernels compute them. So they do with small parts of a graph that would be compiled
again and again because these grow, such as the tokens and positions of `generate` (`Graph.divide`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch_xla import _bindings, _config, _metrics, _timeline
from torch_xla._core.device import client, splits, transfer
from torch_xla._core.graph import graph, interpreter

_CAPACITY = 64
_BYTES = 64 << 20

# Graphs without inputs have the same results every time.
_constants: OrderedDict[tuple[str, tuple[int, ...], bytes], list[Any]] = OrderedDict()


def on() -> bool:
    """Whether small graphs are computed here; a check of values wants them compiled."""
    return _config.XLA_HOST_COMPUTE.get() and not _config.XLA_CHECK_VALUES.get()


def divide(cut: _bindings.Graph, what: _bindings.Cut) -> list[_bindings.Cut]:
    """What to run before a graph is cut again, so that no part of it is a new program; nothing where it is one.

    Args:
        cut: The graph, which has no program yet.
        what: What it was made of.
    """
    parts = cut.divide(what) if on() else []
    if parts:
        _metrics.count("HostParts")
        if _timeline.recorder is not None:
            _timeline.mark("host parts", _bindings.user_frame())
    return parts


def run(cut: _bindings.Graph) -> bool:
    """Computes a cut graph and gives its results to the tensors; False where the CPU kernels refuse it.

    They lack types, want other layouts, and refuse values of which a program makes a number: whether a graph is small
    must not decide whether it raises.
    """
    if client.spmd() and splits.PARTS in cut.leaf_places:
        return False  # each device's are others
    numbers = b"".join(vector.tobytes() for vector in cut.packed_numbers())
    key = (cut.key, cut.number_places, numbers)
    buffers = _constants.get(key)
    if buffers is None:
        described = graph.describe(cut)
        leaves = [
            transfer.download(location, meta.shape, meta.dtype)
            for location, meta in zip(cut.leaf_locations(), described.leaves, strict=True)
        ]
        try:
            results = interpreter.interpret(described, leaves)
        except Exception:
            return False
        promised = [described.nodes[slot].outs[result] for slot, result in described.outputs]
        if any(m is None or r is None or r.shape != m.shape for r, m in zip(results, promised, strict=True)):
            return False  # some leave out statistics that nobody needs
        places = [number if number != splits.ANYWHERE else splits.WHOLE for number in cut.wanted_places]
        places = places or [splits.WHOLE] * len(results)
        buffers = [transfer.upload(result, cut.device, number) for result, number in zip(results, places, strict=True)]
        if not leaves:
            _constants[key] = buffers
            while len(_constants) > _CAPACITY or sum(b.nbytes for found in _constants.values() for b in found) > _BYTES:
                _constants.popitem(last=False)
    else:
        _constants.move_to_end(key)
    cut.attach_shared(buffers)
    _metrics.count("HostCompute")
    return True
