"""Jobs that are not run or that are known to fail, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opdb.cases import Job


@dataclass(frozen=True)
class Entry:
    """Some jobs.

    Attributes:
        ops: Regular expression over operator names.
        reason: Why they are in the table.
        dtypes: Regular expression over dtypes.
        kinds: Regular expression over kinds.
    """

    ops: str
    reason: str
    dtypes: str = ".*"
    kinds: str = ".*"


SKIPS = (
    Entry(r"sparse\..*|to_sparse", "the device has no sparse tensors"),
    Entry(r"chalf", "XLA has no complex numbers of half precision"),
    Entry(r"complex|view_as_complex|polar", "XLA has no complex numbers of half precision", dtypes="float16"),
    Entry(
        "addbmm",
        "the CPU kernel gives `self` another shape, which PyTorch's Meta kernel refuses",
        kinds="inplace",
    ),
    Entry(
        r"msort|topk|mode",
        "many elements are equal in 16 bits, and which of them is named, and gets the gradient, is not defined",
        dtypes="bfloat16|float16",
        kinds="gradient",
    ),
    Entry(r"jiterator_.*", "compiles CUDA source text at run time"),
)


# Differences that are not mended: they count as failures of the sweep, and the fixed sample expects them.
KNOWN: tuple[Entry, ...] = ()

# Calls that PyTorch's CPU kernels refuse because of values, which are not read when a call is recorded.
VALUE_ERRORS = (
    r"index -?\d+ is out of bounds for dimension \d+ with size \d+"
    r"|probability tensor contains either|invalid multinomial distribution"
)


def reason(job: Job, table: tuple[Entry, ...] = SKIPS) -> str | None:
    """Why a job is in a table, or None."""
    for entry in table:
        if (
            re.fullmatch(entry.ops, job.op)
            and re.fullmatch(entry.dtypes, job.dtype)
            and re.fullmatch(entry.kinds, job.kind)
        ):
            return entry.reason
    return None


@dataclass(frozen=True)
class Difference:
    """Differences between overloads of aten on the device and on the CPU that are not mended.

    Attributes:
        ops: Regular expression over overloads.
        text: Regular expression that the difference has.
        reason: Why.
    """

    ops: str
    text: str
    reason: str


DIFFERENCES = (
    Difference(
        r"aten\.(.*sparse|_spdiags).*",
        r"raised NotImplementedError: (\[layout\]|Could not run 'new_compressed_tensor').*; CPU raises",
        "the device has no sparse tensors: it says that before the CPU kernel's own objections",
    ),
    Difference(
        r".*",
        r"CPU raises .*(ZeroDivision|tried to access index|not in the valid range|should be between 0 and 1"
        r"|index .*out of (range|bounds)|out of bounds|probabilit|Poisson rate|must be in the"
        r" range \[0, 1\]|elements of std|p_in|Class values|\|pivot\||Lengths|lengths|non-negative|single nonzero value"
        r"|LinAlgError|singular|sum to|sum of)",
        "values are not read when a call is recorded",
    ),
    Difference(
        r".*",
        r"did not raise.*not implemented for '(BFloat16|Half|UInt\d+)'",
        "XLA has these types, some kernels of the CPU do not",
    ),
    Difference(
        r".*",
        r"did not raise.*derivative for .*not implemented|did not raise.*oneDNN|did not raise.*primitive descriptor",
        "PyTorch takes it apart for this device, and its parts have gradients",
    ),
    Difference(
        r"aten\..*(_backward|_powsum|_forward_impl).*",
        r"did not raise|barrier after it",
        "a backward operator is given what its forward operator gave; what does not go together is not looked for",
    ),
    Difference(
        r"aten\.(_fused_(adam|adamw|sgd|adagrad)_?|_amp_.*|_fused_moving_avg_obs_fq_helper.*)\..*",
        r"Scalar|cannot be converted|n_tensors|1-element|int tensor|barrier after it|at the barrier"
        r"|fused_\w+_kernel\" not implemented for '(Bool|Long|ComplexFloat)'|grads=\[float32\[4\]",
        "arguments of fused optimizer steps, scalers and observers are their callers' own, which never differ so (of"
        " gradients of 4 elements for parameters of 16 the CPU kernel reads what lies behind: 12 elements, by 1e26)",
    ),
    Difference(
        r"aten\.(_compute_linear_combination|slow_conv(3d|_transpose2d|3d_forward)|_dyn_quant_matmul_4bit|_stack"
        r"|_reshape_alias(_copy)?|segment_reduce|_segment_reduce_backward|_trilinear|_weight_norm(_interface)?"
        r"|_native_multi_head_attention|_transformer_encoder_layer_fwd|mkldnn_rnn_layer(_backward)?)\..*",
        r"",
        "an inner operator: of shapes that do not go together its CPU kernel reads beside its tensors, or what nobody"
        " wrote (62 calls of 16 overloads: a third to all elements, by up to 1e27 and in other shapes)",
    ),
    Difference(
        r"aten\.(log_sigmoid_backward|max_pool[23]d_with_indices_backward|native_dropout_backward)\..*",
        r"",
        "indices, masks and buffers are those that the forward operator gave (38 calls of 8: numbers drawn at random in"
        " their place, by up to 8; of a mask that is none the CPU multiplies by it)",
    ),
    Difference(
        r"aten\.(linalg_cholesky_ex|cholesky_inverse|matrix_exp.*)\..*",
        r"",
        "of a matrix that has no such factor, what is left is not defined (19 calls of 5 overloads; NaN on one side, or"
        " 4 to 9 of 9 elements by up to 1.3)",
    ),
    Difference(
        r"aten\.(native_channel_shuffle|dequantize|_foobar|_test_.*|_saturate_weight_to_fp16|_reshape_from_tensor|_nested_compute_contiguous_strides_offsets)\..*",
        r"share memory|derivative",
        "of some calls the CPU gives an argument itself, where the schema says a new tensor, or the other way round"
        " (35 calls of 9 overloads; no value differs)",
    ),
    Difference(r"aten\.get_device\..*", r"", "it tells the device: 0 here, -1 on the CPU"),
    Difference(
        r"aten\.(_to_cpu|_shape_as_tensor|_test_ambiguous_defaults|fbgemm_pack_gemm_matrix_fp16|_pad_packed_sequence|_make_per_(tensor|channel)_quantized_tensor"
        r"|_pack_padded_sequence.*)\..*",
        r"on cpu|1D CPU|must be|Unsupported qscheme|its result is packed",
        "what is on the CPU whatever the device",
    ),
    Difference(
        r".*",
        r"raised .*(log_normal|geometric) not implemented|raised .*Exponential distribution is"
        r"|raised .*expected a floating-point or complex dtype|raised .*have dtype bool",
        "PyTorch's Meta kernels refuse an integer tensor without elements too",
    ),
    Difference(
        r"aten\.(normal|mish_backward|multilabel_margin_loss(_forward)?|arange|_softmax_backward_data)\..*",
        r"\[.*\[0(, \d)*\]",
        "results without elements, in another type, or 0 where the CPU leaves what `out` had (10 calls of 5)",
    ),
    Difference(
        r"aten\.(native_batch_norm|_native_batch_norm_legit.*|_batch_norm.*|batch_norm_update_stats)\..*",
        r"result\[\d\]: shape|CPU Backend|not equal|broadcast a dimension|arguments afterwards",
        "of one statistic without the other, or in evaluation, saved statistics are not defined (7 calls)",
    ),
    Difference(
        r"aten\.addbmm_\..*",
        r"shape|Shape|size",
        "the CPU kernel gives `self` another shape, which PyTorch's Meta kernel refuses",
    ),
    Difference(
        r".*",
        r"CPU raises NotImplementedError: (Could not run 'aten::|convolution_(backward_)?overrideable"
        r"|_scaled_dot_product_fused_attention_overrideable)",
        "PyTorch has no kernel of it for the CPU, whatever the arguments",
    ),
    Difference(
        r"aten\._propagate_xla_data\..*", r"should only be called by XLA", "the operator is made for this device alone"
    ),
    Difference(
        r"aten\._?embedding_bag(_forward_only)?\..*",
        r"raised ValueError: (input|offsets) has to be a 1D Tensor",
        "of indices and offsets of other dimensions the CPU kernel writes beside its tensors; functions of torch.nn"
        " refuse or reshape them",
    ),
    Difference(
        r"aten\._embedding_bag(_forward_only)?\..*",
        r"result\[[123]\]: shape",
        "what only its backward reads has elements where that needs it, and the CPU kernel and its Meta kernel differ",
    ),
    Difference(
        r"aten\.(reflection|replication)_pad[123]d_backward\..*",
        r"not close|not equal|too many values",
        "of more dimensions than its forward takes the CPU kernel reads beside its tensors (15 calls of 5: all but the"
        " first rows)",
    ),
    Difference(
        r"aten\._pdist_(forward|backward)\..*",
        r"not close",
        "of a matrix alone; of more dimensions the CPU reads beside it (1 call, all of 32 elements)",
    ),
    Difference(
        r"aten\._standard_gamma_grad\..*",
        r"not close.*nan",
        "of values that are not positive it is not defined: NaN on one side (10 calls of 2, 1 of 3 to 103 of 128"
        " elements)",
    ),
    Difference(
        r"aten\.binomial\..*",
        r"not close.*nan",
        "of counts and probabilities out of range: NaN on one side (2 calls, all of 3 elements)",
    ),
    Difference(
        r"aten\.(binary_cross_entropy|huber_loss)_backward\..*",
        r"shape|expanded size|at the barrier",
        "of shapes that its forward operator refuses, or does not give, the CPU kernel writes beside its result (shapes"
        " only: 4 calls)",
    ),
    Difference(
        r"aten\.native_layer_norm_backward\..*",
        r"result\[\d\]: shape|Mismatch in shape|at the barrier|not close",
        "its statistics have a size for each row, as the forward operator gives them; of others, and of gradients of"
        " another shape, the CPU kernel reads beside them (2 calls, all of 128 elements, by up to 9e37)",
    ),
    Difference(
        r"aten\.(linspace|logspace)\.(Tensor|Scalar)_.*",
        r"a result is on cpu",
        "without a device the result is on the default one, on every device",
    ),
    Difference(
        r"aten\.block_diag\.out", r"device cpu.*tensors=\[\]", "of no tensors the result is on the default device"
    ),
    Difference(
        r"aten\.(scaled_dot_product_attention|_scaled_mm_v2)\..*",
        r"raised .*(cannot be multiplied|fp8 or fp4).*\[0, ",
        "of tensors without elements the CPU does not look at the others",
    ),
    Difference(
        r"aten\.(mkldnn_.*|to_mkldnn)\..*",
        r"itensor_view_from_dense|mkldnn layout",
        "it takes or gives tensors of the CPU alone",
    ),
    Difference(
        r"aten\._local_scalar_dense\..*",
        r"elements cannot be converted",
        "of several elements the CPU kernel gives the first; item() asks for one",
    ),
    Difference(
        r"aten\.(_gather_sparse_backward|_embedding_bag_sparse_backward|embedding(_sparse)?_backward)\..*",
        r"attribute 'layout'|\[layout\]|Dimension out of range|same number of dimensions"
        r"|EmbeddingDenseBackwardBackward0",
        "the device has no sparse tensors: such gradients are dense, or refused",
    ),
    Difference(
        r"aten\.(_embedding_bag|unfold)_backward\..*",
        r"Dimension out of range|narrow\(\)|result: shape",
        "the gradient has the dimensions that the forward operator gives",
    ),
    Difference(
        r"aten\.(lstm|gru|rnn_\w+)\..*",
        r"raised RuntimeError: Expected .*; CPU (raises IndexError|gives a value)",
        "of weights that are no layer's each device looks at another part first, and oneDNN, for bfloat16, at none (1"
        " call: 2 weights of 3 dimensions where a layer of two directions has 8 of 1 and 2)",
    ),
    Difference(
        r"aten\.ctc_loss\..*",
        r"nan.*targets=complex64",
        "of complex numbers, cut to negative integers, as labels the CPU kernel reads beside its tensors (8 calls)",
    ),
    Difference(
        r"aten\.ldexp\..*",
        r"'Bool'",
        "PyTorch takes it apart for this device, and its parts take booleans on the CPU too",
    ),
    Difference(
        r"aten\.histc\..*", r"'(Long|Bool)'", "kernels of other devices take integers too, and libraries give them some"
    ),
    Difference(
        r"aten\.max_pool1d\..*",
        r"'Long'",
        "the pool of two dimensions that it is made of takes integers on the CPU too",
    ),
    Difference(
        r"aten\.group_norm\..*",
        r"tensor does not have a device",
        "an internal error of the CPU's gradient by a bias without a weight, of no elements",
    ),
    Difference(
        r"aten\.as_strided_scatter\..*",
        r"not (close|equal)",
        "of elements that overlap, which is written last is not defined (2 calls, 1 of 6 elements)",
    ),
    Difference(
        r"aten\._fft_c2c\.out",
        r"can't be cast.*dim=\[\]",
        "without dimensions the CPU kernel copies, whatever the type of what it writes",
    ),
    Difference(
        r"aten\.mse_loss_backward\..*",
        r"bfloat16",
        "of mixed types the CPU kernel rounds to 16 bits on the way: by up to 0.6 %",
    ),
    Difference(
        r"aten\.quantize_per_tensor\..*",
        r"Quantize only works on Float|barrier after it|must be Tensor, not list",
        "quantized tensors are the CPU's: its kernel refuses when it runs",
    ),
    Difference(
        r"aten\._scaled_dot_product_flash_attention_for_cpu\..*",
        r"Accept only 4 dims|expected scalar type",
        "scaled_dot_product_attention calls it with what goes together, and makes no such call for this device",
    ),
)


def accepted(op: str, text: str) -> str | None:
    """Why a difference of an overload is accepted, or None."""
    return next((d.reason for d in DIFFERENCES if re.fullmatch(d.ops, op) and re.search(d.text, text)), None)
