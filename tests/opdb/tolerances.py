"""How results are compared: the one table of tolerances, and the operators whose values are not unique."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

# Relative and absolute tolerance by dtype of the result; integers and booleans are compared exactly. In the 16-bit
# types the absolute one is relative to the largest value of the result: what is rounded to them on the way differs.
DTYPE = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 4e-3),
    torch.float16: (2e-3, 1e-3),
    torch.complex32: (2e-3, 1e-3),
    torch.complex64: (1e-5, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}

# The same of a rule that is lowered alone, with a few small numbers; of a single result no 16 bits need more.
RULE = DTYPE | {
    torch.float32: (1.3e-6, 1e-6),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
}


@dataclass(frozen=True)
class Wider:
    """Operators whose tolerance is a multiple of the usual one.

    Attributes:
        ops: Regular expression over operator names.
        factor: How many times the usual tolerance.
        reason: Why.
        normwise: Whether the absolute tolerance is also multiplied by the largest value of the result.
        gradients: If any, it holds for gradients of these dtypes only.
    """

    ops: str
    factor: float
    reason: str
    normwise: bool = False
    gradients: tuple[torch.dtype, ...] = ()


WIDER = (
    Wider(
        r"linalg\..*|cholesky.*|triangular_solve|svd.*|pinverse|logdet|lu.*|ormqr|.*pca_lowrank|.*svd_lowrank|matrix_exp",
        20,
        "the condition number of the sample multiplies rounding",
        normwise=True,
    ),
    Wider(
        r"nn\.functional\.ctc_loss",
        100,
        "the CPU's float32 gradient is off its float64 one by as much, and five times as far as this one",
    ),
    Wider(
        r"special\..*polynomial.*",
        1,
        "the terms of the recurrence cancel, and round relative to the largest",
        normwise=True,
    ),
    Wider(
        r"atanh",
        4,
        "1 - x * x cancels near 1, and what was rounded before grows with it, by the CPU's kernel as much",
        gradients=(torch.float16,),
    ),
    Wider(
        r"nn\.functional\.scaled_dot_product_attention|torch\.ops\.aten\._scaled_dot_product_flash_attention_for_cpu",
        8,
        "the fused operator's gradient uses its output, rounded to 16 bits; of three dimensions, the CPU fuses nothing",
        gradients=(torch.bfloat16, torch.float16),
    ),
    Wider(
        r"fft\..*|i?stft|(nn\.functional\.)?(conv.*|interpolate.*|.*linear|grid_sample)|_upsample.*|grid_sampler.*"
        r"|.*(mm|mv|matmul|bmm)|einsum|kron|tensordot|inner|cov|corrcoef|.*attention.*",
        1,
        "sums in another order round relative to the largest term",
        normwise=True,
    ),
)

# What rounds more than once on the way: rules have the tolerance of all others then.
ROUNDED = (
    Wider(r"polygamma.*|gelu_backward", 4, "terms cancel between the poles, and where tanh is near -1"),
    Wider(
        r"linalg\..*|cholesky.*|triangular_solve|lu_.*|[cp]dist.*|euclidean_dist|fft\..*|conv.*|.*attention.*|.*norm.*"
        r"|upsample.*|grid_sampler.*|.*pool.*|log_softmax.*|.*polynomial.*|cosh|sinh|logcumsumexp|addmm_activation"
        r"|quantized_matmul|cum(sum|prod)|sum|prod|binary_cross_entropy_with_logits",
        1,
        "sums, products and exponentials that are rounded before they meet",
    ),
)


@dataclass(frozen=True)
class Loose:
    """Operators whose values are not all compared one by one.

    Attributes:
        ops: Regular expression over operator names.
        kind: What is compared; a key of `LOOSE_KINDS`.
        reason: Why.
    """

    ops: str
    kind: str
    reason: str


LOOSE_KINDS = {
    "random": "shapes, dtypes and means, where the CPU's values change with the seed; else everything",
    "uninitialized": "shapes and dtypes",
    "gauge": "what the operator database's own post-processing leaves, such as absolute values",
    "first": "the first result",
    "wide": "in 16-bit types with the CPU kernel for float32, rounded",
    "ties": "values, and the values that the indices point to, unless the call asks for a stable order",
}

LOOSE = (
    Loose(r"(new_)?empty(_like|_strided|_permuted)?|new_empty_strided", "uninitialized", "memory is not initialized"),
    Loose(
        r"bernoulli|cauchy|exponential|geometric|log_normal|normal\|?.*|uniform|__rand__|rand(n|int)?(_like)?|randperm"
        r"|multinomial|nn\.functional\.(feature_)?(alpha_)?dropout.*|nn\.functional\.rrelu"
        r"|nn\.functional\.fractional_max_pool.*|nn\.functional\.(scaled_dot_product|multi_head)_attention.*"
        r"|torch\.ops\.aten\._(flash|efficient)_attention_forward|pca_lowrank|svd_lowrank",
        "random",
        "each device has its own stream of random numbers",
    ),
    Loose(
        r"(nn\.functional\.)?grid_sample(r(_[23]d)?)?|nn\.functional\.(nll_loss|instance_norm)|(linalg\.)?matrix_exp|atanh",
        "wide",
        "the CPU kernel rounds each intermediate value to 16 bits, down to positions and to NaN",
    ),
    Loose(r"sort|argsort|topk|kthvalue|mode", "ties", "which of several equal elements is named is not defined"),
    Loose(r"(linalg\.)?(svd|eigh?)", "gauge", "vectors are unique up to sign or phase"),
    Loose(
        r"native_batch_norm|_native_batch_norm_legit|_batch_norm_with_update",
        "first",
        "in evaluation the CPU kernel leaves the saved statistics empty, which PyTorch's Meta kernel does not",
    ),
    Loose(
        r"native_layer_norm|native_group_norm",
        "first",
        "the dtype of the saved statistics depends on the device, in PyTorch's Meta kernel too",
    ),
)


def of(op: str, expected: torch.Tensor, gradient: bool = False, rule: bool = False) -> tuple[float, float]:
    """Relative and absolute tolerance of a result.

    Args:
        op: The operator.
        expected: The result.
        gradient: Whether it is the gradient by one of the operator's arguments.
        rule: Whether it is of a rule that was lowered alone.
    """
    rounded = next((entry for entry in ROUNDED if re.fullmatch(entry.ops, op)), None) if rule else None
    if rule and rounded is None:
        return RULE.get(expected.dtype, (0.0, 0.0))
    relative, absolute = DTYPE.get(expected.dtype, (0.0, 0.0))
    normwise = expected.dtype in (torch.float16, torch.bfloat16)
    result = next((wider for wider in WIDER if _fits(wider, op, expected.dtype, gradient)), None)
    for wider in filter(None, (rounded, result)):
        relative, absolute = relative * wider.factor, absolute * wider.factor
        normwise = normwise or wider.normwise
    normwise = normwise and (expected.is_floating_point() or expected.is_complex())
    finite = expected[expected.isfinite()] if normwise else expected.new_empty(0)
    return relative, absolute * (max(1.0, finite.abs().max().item()) if finite.numel() else 1.0)


def _fits(wider: Wider, op: str, dtype: torch.dtype, gradient: bool) -> bool:
    return bool(re.fullmatch(wider.ops, op)) and (not wider.gradients or gradient and dtype in wider.gradients)


def loose(op: str) -> str:
    """How the values of an operator are compared: a key of `LOOSE_KINDS`, or empty for one by one."""
    return next((entry.kind for entry in LOOSE if re.fullmatch(entry.ops, op)), "")
