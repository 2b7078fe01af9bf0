"""Attention under the names that model libraries look for, as functions and as ``torch.ops.xla`` operators.

The work is done by the device's own operators: nothing here is specific to one kind of hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla._internal.jax_workarounds import jax_import_guard as jax_import_guard
from torch_xla.core.xla_builder import call_jax
from torch_xla.core.xla_model import XLA_LIB
from torch_xla.distributed.spmd.manual import given_or_global
from torch_xla.distributed.spmd.marking import mark_sharding_with_gradients
from torch_xla.experimental._paged_attention import multi_queries_paged_attention as multi_queries_paged_attention
from torch_xla.experimental._paged_attention import paged_attention as paged_attention
from torch_xla.experimental._paged_attention import ragged_paged_attention as ragged_paged_attention


class FlashAttention:
    """The same as `flash_attention`, in the form of an autograd function."""

    @staticmethod
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        q_segment_ids: torch.Tensor | None = None,
        kv_segment_ids: torch.Tensor | None = None,
        sm_scale: float = 1.0,
        ab: torch.Tensor | None = None,
        partition_spec: Any = None,
        mesh: Any = None,
    ) -> torch.Tensor:
        """Calls `flash_attention` with every argument by position."""
        return flash_attention(
            q,
            k,
            v,
            causal,
            q_segment_ids,
            kv_segment_ids,
            sm_scale,
            ab=ab,
            partition_spec=partition_spec,
            mesh=mesh,
        )


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Attention: ``softmax(sm_scale * (q k^T + ab)) v``, with gradients for `q`, `k`, `v` and `ab`.

    Args:
        q: Queries, ``[batch, heads, L, dim]``. They are not scaled by their dimension: that is what `sm_scale` is for.
        k: Keys, ``[batch, heads, S, dim]``.
        v: Values, ``[batch, heads, S, dim]``.
        causal: Whether query i sees only the keys 0 to i.
        q_segment_ids: Integers ``[batch, L]``; a query sees only the keys of its own segment. One without any gives
            zeros.
        kv_segment_ids: Integers ``[batch, S]``.
        sm_scale: Factor of the scores.
        ab: Bias of the scores before they are scaled, ``[batch, heads, L, S]`` or broadcast to it.
        partition_spec: How the four dimensions are split over the mesh, as for `mark_sharding`.
        mesh: The devices, by default the global mesh; see `set_global_mesh`.

    Returns:
        ``[batch, heads, L, dim]`` in the dtype of `q`.

    Raises:
        ValueError: One of the segment ids is missing, or their shapes do not fit.
        AssertionError: The partition does not fit the tensors, or there is no mesh for it.
    """
    if partition_spec is not None:
        devices = given_or_global(mesh)
        q, k, v = (mark_sharding_with_gradients(tensor, devices, partition_spec) for tensor in (q, k, v))
    bias = _bias(q, k, causal, _same_segment(q, k, q_segment_ids, kv_segment_ids), sm_scale, ab)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal and bias is None, scale=sm_scale
    )
    return out if partition_spec is None else mark_sharding_with_gradients(out, devices, partition_spec)


def _same_segment(
    q: torch.Tensor, k: torch.Tensor, q_ids: torch.Tensor | None, kv_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """Which query may see which key, ``[batch, 1, L, S]``; None without segments."""
    if q_ids is None and kv_ids is None:
        return None
    if q_ids is None or kv_ids is None:
        argument = "q_segment_ids" if kv_ids is None else "kv_segment_ids"
        raise ValueError(message("flash_attention", f"got only {argument}", expected="both segment ids or none"))
    for name, ids, length in (("q_segment_ids", q_ids, q.shape[-2]), ("kv_segment_ids", kv_ids, k.shape[-2])):
        if tuple(ids.shape) != (q.shape[0], length):
            got = f"got {name} of shape {tuple(ids.shape)}"
            raise ValueError(message("flash_attention", got, expected=str((q.shape[0], length))))
    return (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]


def _bias(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    visible: torch.Tensor | None,
    sm_scale: float,
    ab: torch.Tensor | None,
) -> torch.Tensor | None:
    """One mask or bias of the scaled scores; None where causality alone is the mask, which needs no array."""
    if causal and (visible is not None or ab is not None):
        below = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        visible = below if visible is None else visible & below
    if ab is None:
        return visible
    # The scores of half types are float32, and so may be their bias.
    scaled = ab.to(torch.promote_types(q.dtype, torch.float32)) * sm_scale
    return scaled if visible is None else scaled.masked_fill(~visible, float("-inf"))


def make_kernel_from_pallas(
    kernel: Callable[..., Any], output_shape_dtype_fn: Callable[..., Sequence[tuple[Sequence[int], torch.dtype]]]
) -> Callable[..., Any]:
    """A function of xla tensors that calls a JAX function, such as one around a Pallas kernel, without gradients.

    The kernel runs where JAX has it run: on CPUs it needs ``interpret=True`` in its `pallas_call`.

    Args:
        kernel: Takes JAX arrays where the tensors are, all else as it is given. Make it once, not at each step.
        output_shape_dtype_fn: Takes the same positional arguments, and says of each result its shape and dtype.

    Returns:
        The function; it returns a tensor, or a tuple of several. Its keyword arguments `static_argnums` and
        `static_argnames` are not needed: what is no tensor is constant.
    """

    def call(*args: Any, static_argnums: Any = None, static_argnames: Any = None, **kwargs: Any) -> Any:
        outputs = call_jax(kernel, args, kwargs)
        results = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        expected = [(tuple(shape), dtype) for shape, dtype in output_shape_dtype_fn(*args)]
        got = [(tuple(result.shape), result.dtype) for result in results]
        if got != expected:
            raise ValueError(
                message("pallas", f"got results {got}", expected=f"{expected}, as output_shape_dtype_fn has it")
            )
        return results[0] if len(results) == 1 else results

    return call


def repeat_with_fixed_output_size(input: torch.Tensor, repeats: torch.Tensor, total_repeat_length: int) -> torch.Tensor:
    """`torch.repeat_interleave` of a vector whose result has a length known beforehand, so that the graph stays whole.

    Args:
        input: A vector.
        repeats: How often each of its elements comes.
        total_repeat_length: Length of the result: it is cut off there, or filled up with the last element.
    """
    return input[_group_of_rows(repeats, total_repeat_length).clamp(max=input.shape[0] - 1)]


def _group_of_rows(sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Which of the groups, which follow each other, each row is in; behind the last it is their number."""
    ends = sizes.cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


def gmm(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    tiling: Any = None,
    group_offset: torch.Tensor | None = None,
    transpose_rhs: bool = False,
) -> torch.Tensor:
    """Products of groups of rows, each with a matrix of its own, as mixtures of experts need them.

    Args:
        lhs: Rows, ``[rows, inner]``, those of one group after those of another.
        rhs: One matrix per group, ``[groups, inner, columns]``.
        group_sizes: How many rows each group has.
        tiling: Not used: a matter of speed on TPUs.
        group_offset: Must be None.
        transpose_rhs: Whether `rhs` is ``[groups, columns, inner]``.

    Returns:
        ``[rows, columns]``; zeros for rows of no group.
    """
    if group_offset is not None:
        raise ValueError(message("gmm", "got a group_offset", expected="all groups on this device", do="leave it out"))
    rhs = rhs.mT if transpose_rhs else rhs
    group = _group_of_rows(group_sizes, lhs.shape[0])
    result = lhs.new_zeros(lhs.shape[0], rhs.shape[2])
    for number in range(rhs.shape[0]):  # one matrix at a time: gathering one per row would need rows times its size
        result = torch.where((group == number)[:, None], lhs @ rhs[number], result)
    return result


def quantized_matmul_int8(
    x: torch.Tensor,
    w: torch.Tensor,
    scalar: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    quant_block_size: torch.Tensor | None = None,
    quantize_activation: bool = False,
    batch_block_size: int | None = None,
    out_block_size: int | None = None,
    in_block_size: int | None = None,
) -> torch.Tensor:
    """``torch.ops.xla.quantized_matmul`` with one factor per column, in the dtype of `x`.

    Args:
        x: ``[rows, inner]``.
        w: int8, ``[columns, inner]``.
        scalar: Factor of each column.
        zero_point: What is taken from each weight before, times its factor.
        quant_block_size: Must be None.
        quantize_activation: Whether each row of `x` is rounded to int8 first.
        batch_block_size: Not used: a matter of speed on TPUs, as are the others.
        out_block_size: See there.
        in_block_size: See there.
    """
    from torch_xla.experimental import xla_quantized_matmul  # noqa: F401

    if quant_block_size is not None:
        got = "got a quant_block_size"
        raise ValueError(
            message("quantized_matmul", got, expected="None", do="call torch.ops.xla.quantized_matmul for blocks")
        )
    result = torch.ops.xla.quantized_matmul(x, w, scalar, zero_point, quantize_activation=quantize_activation)
    return result.to(x.dtype)


_OPERATORS = {
    "flash_attention(Tensor q, Tensor k, Tensor v, bool casual=False) -> Tensor": flash_attention,
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor lengths, Tensor page_indices, "
    "int pages_per_compute_block, str? megacore_mode=None, "
    "float? attn_logits_soft_cap=None) -> Tensor": paged_attention,
    "multi_queries_paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor lengths, Tensor page_indices, "
    "Tensor effective_q_lens, int num_kv_pages_per_compute_block, int num_queries_per_compute_block, bool use_kernel, "
    "float? attn_logits_soft_cap=None) -> Tensor": multi_queries_paged_attention,
    "ragged_paged_attention(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor cu_q_lens, "
    "Tensor num_seqs, float sm_scale=1, int? sliding_window=None, float? soft_cap=None, float? mask_value=None, "
    "float? k_scale=None, float? v_scale=None, bool use_kernel=True, int? num_kv_pages_per_block=None, "
    "int? num_queries_per_block=None, int? vmem_limit_bytes=None) -> Tensor": ragged_paged_attention,
    "gmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int[]? tiling=None, Tensor? group_offset=None, "
    "bool transpose_rhs=False) -> Tensor": gmm,
    "quantized_matmul_int8(Tensor x, Tensor w, Tensor scalar, Tensor? zero_point=None, Tensor? quant_block_size=None, "
    "bool quantize_activation=False, int? batch_block_size=None, int? out_block_size=None, "
    "int? in_block_size=None) -> Tensor": quantized_matmul_int8,
}
for _schema, _function in _OPERATORS.items():
    XLA_LIB.define(_schema)
    # Made of PyTorch's operators: gradients, shapes and other devices follow.
    XLA_LIB.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")
