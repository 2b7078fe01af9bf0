"""Sets the recorder up, once, at import: nothing here starts a client, a thread or JAX."""

from __future__ import annotations

import os

import torch

from torch_xla import _bindings, _config, _metrics
from torch_xla._core import backend, programs, sync
from torch_xla.ops import whole

_STACK = 8  # frames that XLA_IR_DEBUG keeps of every operator


def install() -> None:
    """Registers device ``xla`` with its operators and connects the pipeline."""
    sync.install()
    programs.install()
    _bindings.record_whole(whole.names())
    for name in whole.CONSTANT_NUMBERS:
        op, _, overload = name.partition(".")
        _bindings.set_static_numbers(f"aten::{op}", overload)
    _bindings.set_special_numbers(not _config.XLA_NO_SPECIAL_SCALARS.get())
    _bindings.set_frame_depth(_STACK if _config.XLA_IR_DEBUG.get() else int(_config.XLA_RETRACE_REPORT.get()))
    # A user's line is one outside PyTorch and this package.
    for file in (torch.__file__, _config.__file__):
        _bindings.add_skipped_prefix(os.path.dirname(file) + os.sep)
    _metrics.provide_group(lambda: {f"xla::{name}": calls for name, calls in _bindings.op_counts().items()})
    _metrics.provide("CreateXlaTensor", _bindings.created_tensors)
    backend.publish_count()
