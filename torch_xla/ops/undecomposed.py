"""Operators that are recorded whole although PyTorch's own kernels for any device could take them apart.

Read at import, so it names them without importing JAX. Every one has a lowering rule.
"""

from __future__ import annotations

VIEWS = """
select.int slice.Tensor transpose.int t permute unsqueeze squeeze squeeze.dim squeeze.dims
expand _reshape_alias diagonal split.Tensor split_with_sizes unbind.int view.dtype unfold view_as_real view_as_complex
_conj _neg_view
""".split()

OPERATORS = """
_unsafe_view linear native_layer_norm native_group_norm convolution_backward embedding stack mean sum
repeat masked_fill.Scalar masked_fill.Tensor index_put _scaled_dot_product_fused_attention_overrideable
_scaled_dot_product_fused_attention_overrideable_backward
_grouped_mm addr addr_ addr.out kron.out matmul.out linear.out mode.values any.dims_out all.dims_out
kaiser_window kaiser_window.periodic kaiser_window.beta conj_physical.out conj_physical_
ldexp.Tensor ldexp.out ldexp_
""".split()

# PyTorch's kernels of these, for any device, read the memory of their arguments, which this device's tensors lack.
HOST_ONLY = """
_reshape_from_tensor choose_qparams_optimized _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward
range.out_ _saturate_weight_to_fp16 fbgemm_linear_quantize_weight _lazy_clone
""".split()

# They give nothing that a program would be run for.
ASSERTS = """
_assert_async _assert_async.msg _functional_assert_async.msg
""".split()

# They have an argument check_errors, and the names under which they raise what they find then.
CHECKED = {
    "linalg_cholesky_ex": "linalg.cholesky_ex",
    "linalg_cholesky_ex.L": "linalg.cholesky_ex",
    "linalg_inv_ex": "linalg.inv_ex",
    "linalg_inv_ex.inverse": "linalg.inv_ex",
    "linalg_ldl_factor_ex": "torch.linalg.ldl_factor_ex",
    "linalg_ldl_factor_ex.out": "torch.linalg.ldl_factor_ex",
    "linalg_lu_factor_ex": "torch.linalg.lu_factor_ex",
    "linalg_lu_factor_ex.out": "torch.linalg.lu_factor_ex",
    "_linalg_solve_ex": "torch.linalg.solve_ex",
    "_linalg_solve_ex.result": "torch.linalg.solve_ex",
}

# Their results hold addresses of the host, for CPU kernels to follow.
PACKED_ON_HOST = """
fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix fbgemm_pack_quantized_matrix.KN
""".split()

# Scalars, by position, that XLA can do more with where it knows them, as with an exponent of 2: they are inputs of a
# program only once they varied; all others are from the start.
CONSTANTS = {
    "dist": 2,
    "linalg_vector_norm": 1,
    "multi_margin_loss_backward": 3,
    "norm.Scalar": 1,
    "norm.ScalarOpt_dim": 1,
    "norm.ScalarOpt_dim_dtype": 1,
    "norm.ScalarOpt_dtype": 1,
    "pow.Tensor_Scalar": 1,
}

# Operators with Scalars that have no rule: PyTorch takes them apart, and has to know all their numbers.
DECOMPOSED = """
_addmm_activation celu elu elu_backward hardshrink index_add index_fill.int_Scalar isin.Scalar_Tensor isin.Tensor_Scalar
multi_margin_loss renorm rrelu_with_noise_backward softplus softplus_backward softshrink std.correction
std_mean.correction threshold
""".split()

# Operators that PyTorch has no Meta kernel for: the result is contiguous, with shape and type of this argument.
SHAPED_LIKE = {
    "_ctc_loss_backward": 1,
    "_ctc_loss_backward.Tensor": 1,
    "_dirichlet_grad": 0,
    "_sample_dirichlet": 0,
    "_standard_gamma_grad": 0,
    "binomial": 0,
    "fractional_max_pool3d_backward": 1,
    "multi_margin_loss_backward": 1,
    "multilabel_margin_loss_backward": 1,
}

# The same with several results, each with the strides of its argument too, or nothing where that is none.
EACH_LIKE = {"_scaled_dot_product_fused_attention_overrideable_backward": (1, 2, 3, 4)}  # PyTorch 2.11


def names() -> list[str]:
    """Qualified names, such as ``aten::select.int``."""
    return [f"aten::{name}" for name in VIEWS + OPERATORS]
