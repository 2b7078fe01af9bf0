"""Operators that are recorded whole although PyTorch's own kernels for any device could take them apart.

Read at import, so it names them without importing JAX. Every one has a lowering rule.
"""

from __future__ import annotations

VIEWS = """
alias detach lift_fresh select.int slice.Tensor transpose.int t permute unsqueeze squeeze squeeze.dim squeeze.dims
expand diagonal split.Tensor split_with_sizes unbind.int view.dtype unfold view_as_real view_as_complex
""".split()

OPERATORS = """
native_layer_norm native_group_norm convolution convolution_backward embedding stack mean sum repeat masked_fill.Scalar
masked_fill.Tensor index_put
""".split()


def names() -> list[str]:
    """Qualified names, such as ``aten::select.int``."""
    return [f"aten::{name}" for name in VIEWS + OPERATORS]
