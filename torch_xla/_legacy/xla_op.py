"""`Op`: a value inside an XLA computation that is written in Python, operation by operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._core.functions import jax_functions
from torch_xla._errors import message
from torch_xla._legacy.xla_shape import TORCH_TO_XLA, XLA_TO_TORCH, Shape


class Builder:
    """The computation an `Op` belongs to; carries nothing but a name."""

    def __init__(self, name: str) -> None:
        self.name = name


def _arrays(op: Any) -> Any:
    """Ops as arrays, sequences as tuples of what is in them."""
    if isinstance(op, Op):
        return op.op
    if isinstance(op, (list, tuple, range)):
        return tuple(_arrays(o) for o in op)
    return op


def _combiner(computation: Callable[..., Any]) -> Callable[..., Any]:
    """A function over ops as a function over arrays."""

    def combine(*values: Any) -> Any:
        return _arrays(computation(*(Op(v) for v in values)))

    return combine


def _alone(self: Op) -> tuple[Any, ...]:
    return (self,)


def _both(self: Op, rhs: Op) -> tuple[Any, ...]:
    return self, rhs


def _method(name: str, form: Callable[..., tuple[Any, ...]] = _both) -> Callable[..., Any]:
    """A method that calls a function of `jax.lax` with the arguments that `form` gives, whose parameters it has."""

    @functools.wraps(form)
    def method(*args: Any, **kwargs: Any) -> Op:
        from jax import lax

        return Op(getattr(lax, name)(*_arrays(form(*args, **kwargs))))

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"`jax.lax.{name}`."
    return method


class Op:
    """A value inside a computation: an array, or a tuple of them.

    The operations are those of XLA's builder, https://openxla.org/xla/operation_semantics.

    Attributes:
        op: The JAX array or tuple it stands for.
    """

    def __init__(self, op: Any) -> None:
        self.op = op

    def shape(self) -> Shape:
        """Element type and sizes."""
        if isinstance(self.op, tuple):
            return Shape([Op(o).shape().shape for o in self.op])
        from torch_xla.ops import dtypes

        return Shape.create(Op.from_torch_type(dtypes.torch_dtype(self.op.dtype)), self.op.shape)

    def builder(self) -> Builder:
        """The builder of constants of the same computation."""
        return Builder("computation")

    # Arithmetic: both operands have one type.
    __add__ = _method("add")
    __sub__ = _method("sub")
    __mul__ = _method("mul")
    __matmul__ = _method("dot")
    __truediv__ = _method("div")
    __pow__ = _method("pow")
    __mod__ = _method("rem")
    __neg__ = _method("neg", _alone)
    __not__ = __invert__ = _method("bitwise_not", _alone)
    __and__ = _method("bitwise_and")
    __or__ = _method("bitwise_or")
    __xor__ = _method("bitwise_xor")
    __eq__ = _method("eq")
    __ne__ = _method("ne")
    __hash__ = object.__hash__
    __le__ = _method("le")
    __lt__ = _method("lt")
    __ge__ = _method("ge")
    __gt__ = _method("gt")
    __lshift__ = _method("shift_left")

    def __rshift__(self, rhs: Op) -> Op:
        import jax.numpy as jnp

        unsigned = jnp.issubdtype(self.op.dtype, jnp.unsignedinteger)
        shifted: Op = _method("shift_right_logical" if unsigned else "shift_right_arithmetic")(self, rhs)
        return shifted

    atan2 = _method("atan2", lambda self, other: (self, other))
    max = _method("max", lambda self, other: (self, other))
    min = _method("min", lambda self, other: (self, other))
    clamp = _method("clamp", lambda self, min_value, max_value: (min_value, self, max_value))
    select = _method("select", lambda self, true_value, false_value: (self, true_value, false_value))

    acos = _method("acos", _alone)
    asin = _method("asin", _alone)
    atan = _method("atan", _alone)
    ceil = _method("ceil", _alone)
    clz = _method("clz", _alone)
    conj = _method("conj", _alone)
    cos = _method("cos", _alone)
    cosh = _method("cosh", _alone)
    erf = _method("erf", _alone)
    erfc = _method("erfc", _alone)
    exp = _method("exp", _alone)
    expm1 = _method("expm1", _alone)
    floor = _method("floor", _alone)
    imag = _method("imag", _alone)
    log = _method("log", _alone)
    log1p = _method("log1p", _alone)
    real = _method("real", _alone)
    rsqrt = _method("rsqrt", _alone)
    sin = _method("sin", _alone)
    sinh = _method("sinh", _alone)
    sqrt = _method("sqrt", _alone)
    tan = _method("tan", _alone)
    tanh = _method("tanh", _alone)
    erfinf = _method("erf_inv", _alone)

    # Form.
    reshape = _method(
        "reshape", lambda self, sizes, dimensions=None, inferred_dimension=None: (self, sizes, dimensions or None)
    )
    broadcast = _method("broadcast", lambda self, sizes: (self, sizes))
    broadcast_in_dim = _method("broadcast_in_dim", lambda self, sizes, dimensions: (self, sizes, dimensions))
    transpose = _method("transpose", lambda self, permutation: (self, permutation))
    rev = _method("rev", lambda self, dimensions: (self, dimensions))
    slice = _method(
        "slice", lambda self, start_indices, limit_indices, strides=None: (self, start_indices, limit_indices, strides)
    )
    slice_in_dim = _method(
        "slice_in_dim",
        lambda self, start_index, limit_index, dimno, stride=1: (self, start_index, limit_index, stride, dimno),
    )
    dynamic_slice = _method(
        "dynamic_slice", lambda self, start_indices, slice_sizes: (self, start_indices, slice_sizes)
    )
    dynamic_update_slice = _method(
        "dynamic_update_slice", lambda self, update, start_indices: (self, update, start_indices)
    )
    pad = _method("pad", lambda self, value, config: (self, value, config))

    def cast(self, to_type: str) -> Op:
        """Values of another type."""
        from torch_xla.ops import dtypes

        return Op(dtypes.cast(self.op, Op.to_torch_type(to_type)))

    def bitcast(self, to_type: str) -> Op:
        """The same bits as another type."""
        from jax import lax

        from torch_xla.ops import dtypes

        return Op(lax.bitcast_convert_type(self.op, dtypes.numpy_dtype(Op.to_torch_type(to_type))))

    # Convolutions and windows.

    def conv_general_dilated(
        self,
        kernel: Op,
        window_strides: Sequence[int],
        padding: Any = "valid",
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        *,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision_config: Any = None,
        **dimensions: Any,
    ) -> Op:
        """A convolution whose dimensions are named by number; see XLA's ConvGeneralDilated.

        Args:
            kernel: The kernel.
            window_strides: Steps of the window.
            padding: ``"valid"``, ``"same"`` or margins by dimension.
            lhs_dilation: Steps between the input's elements.
            rhs_dilation: Steps between the kernel's elements.
            feature_group_count: Groups of features.
            batch_group_count: Groups of the batch.
            precision_config: Ignored.
            **dimensions: `input_batch_dimension`, `input_feature_dimension`, `kernel_input_feature_dimension`,
                `kernel_output_feature_dimension`, `output_batch_dimension`, `output_feature_dimension`,
                `input_spatial_dimensions`, `kernel_spatial_dimensions`, `output_spatial_dimensions`.
        """
        from jax import lax

        def order(kind: str, *ends: str) -> tuple[int, ...]:
            spatial = dimensions.get(f"{kind}_spatial_dimensions", range(2, self.op.ndim))
            return (*(dimensions.get(f"{kind}_{end}_dimension", i) for i, end in enumerate(ends)), *spatial)

        return Op(
            lax.conv_general_dilated(
                self.op,
                kernel.op,
                tuple(window_strides),
                padding.upper() if isinstance(padding, str) else padding,
                lhs_dilation,
                rhs_dilation,
                lax.ConvDimensionNumbers(
                    order("input", "batch", "feature"),
                    order("kernel", "output_feature", "input_feature"),
                    order("output", "batch", "feature"),
                ),
                feature_group_count,
                batch_group_count,
            )
        )

    def conv(self, kernel: Op, window_strides: Sequence[int], **options: Any) -> Op:
        """A convolution of NC… with OI…; the options are those of `conv_general_dilated`."""
        return self.conv_general_dilated(kernel, window_strides, **options)

    conv_general = conv_general_dilated
    conv_with_general_padding = conv
    conv_with_general_dimensions = conv_general_dilated

    reduce_window = _method(
        "reduce_window",
        lambda self, init_value, computation, window_dimensions, window_strides, padding="valid": (
            *(self, init_value, _combiner(computation)),
            *(window_dimensions, window_strides, padding.upper()),
        ),
    )
    reduce = _method(
        "reduce",
        lambda self, init_value, computation, dimensions: (self, init_value, _combiner(computation), dimensions),
    )

    def reduce_all(self, init_value: Op, computation: Callable[..., Op]) -> Op:
        """Combines all values."""
        reduced: Op = self.reduce(init_value, computation, range(self.op.ndim))
        return reduced

    def triangualr_solve(
        self,
        b: Op,
        left_side: bool | None = None,
        lower: bool | None = None,
        unit_diagonal: bool | None = None,
        transpose_a: bool | None = None,
    ) -> Op:
        """Solves ``a x = b``, or ``x a = b``, for a triangular matrix."""
        from jax.lax import linalg

        return Op(
            linalg.triangular_solve(
                self.op,
                b.op,
                left_side=bool(left_side),
                lower=bool(lower),
                unit_diagonal=bool(unit_diagonal),
                transpose_a=bool(transpose_a),
            )
        )

    # Tuples and control flow.

    def get_tuple_element(self, index: int) -> Op:
        """One element of a tuple."""
        return Op(self.op[index])

    def conditional(self, true_operand: Op, false_operand: Op, true_computation: Any, false_computation: Any) -> Op:
        """Calls the one computation where this is true, else the other, each of its operand or a tuple's elements."""
        import jax

        branches = (Op.wrap_function(true_computation), Op.wrap_function(false_computation))
        return Op(
            jax.lax.cond(
                self.op.astype(bool),
                lambda a, _: _arrays(branches[0](Op(a))),
                lambda _, b: _arrays(branches[1](Op(b))),
                true_operand.op,
                false_operand.op,
            )
        )

    def mkconditional(self, ops: Sequence[Op], true_fn: Any, false_fn: Any, **kwargs: Any) -> Op:
        """`conditional` with the same operands for both."""
        operand = Op.tuple(ops)
        return self.conditional(operand, operand, true_fn, false_fn)

    def while_loop(self, condition_computation: Any, body_computation: Any) -> Op:
        """Calls the body for as long as the condition holds; this is the state it starts with."""
        import jax

        condition, body = Op.wrap_function(condition_computation), Op.wrap_function(body_computation)
        return Op(jax.lax.while_loop(lambda s: _arrays(condition(Op(s))), lambda s: _arrays(body(Op(s))), self.op))

    @classmethod
    def mkwhile(cls, ops: Sequence[Op], condition_fn: Any, body_fn: Any, **kwargs: Any) -> Op:
        """`while_loop` that starts with the ops as a tuple."""
        return Op.tuple(ops).while_loop(condition_fn, body_fn)

    @classmethod
    def wrap_function(cls, fn: Any) -> Callable[..., Op]:
        """A function whose tuple argument is spread, and whose result is one op."""

        def wrapper(*args: Op, **kwargs: Any) -> Op:
            if len(args) == 1 and isinstance(args[0].op, tuple):
                args = tuple(Op(o) for o in args[0].op)
            return Op(_arrays(fn(*args, **kwargs)))

        return wrapper

    @classmethod
    def call(cls, computation: Any, ops: Sequence[Op], builder: Builder | None = None) -> Op:
        """Calls a function over ops."""
        return Op(_arrays(computation(*ops)))

    @classmethod
    def map(
        cls,
        ops: Sequence[Op],
        computation: Callable[..., Op],
        dimensions: Sequence[int],
        static_operands: Sequence[Op] = (),
        builder: Builder | None = None,
    ) -> Op:
        """Calls a function over scalars for each element."""
        import jax

        function: Any = _combiner(computation)
        for _ in dimensions:
            function = jax.vmap(function)
        return Op(function(*_arrays(ops)))

    @classmethod
    def tuple(cls, ops: Sequence[Op], builder: Builder | None = None) -> Op:
        """A tuple of values."""
        return Op(_arrays(tuple(ops)))

    concat_in_dim = classmethod(
        _method("concatenate", lambda cls, ops, dimension, builder=None: (ops, dimension)),
    )

    @classmethod
    def sort(cls, ops: Sequence[Op], comparator: Any, dimension: int = -1, is_stable: bool | None = None) -> Op:
        """Sorts all values by the first, ascending; `comparator` must be None."""
        if comparator is not None:
            raise NotImplementedError(message("xla_builder", "got a comparator", expected="None: ascending order"))
        from jax import lax

        return Op(lax.sort(_arrays(ops), dimension=dimension, is_stable=bool(is_stable)))

    # Values from nothing.

    @classmethod
    def constant(cls, builder: Builder | None, value: torch.Tensor) -> Op:
        """The values of a CPU tensor."""
        import jax.numpy as jnp

        return Op(jnp.asarray(jax_functions.as_numpy(value)))

    @classmethod
    def scalar(cls, builder: Builder | None, value: Any, dtype: str | None = None) -> Op:
        """A number, float32 by default."""
        return Op.constant(builder, torch.tensor(value, dtype=Op.to_torch_type(dtype)))

    @classmethod
    def zero(cls, builder: Builder | None, dtype: str | None = None) -> Op:
        """The number 0."""
        return Op.scalar(builder, 0, dtype)

    @classmethod
    def one(cls, builder: Builder | None, dtype: str | None = None) -> Op:
        """The number 1."""
        return Op.scalar(builder, 1, dtype)

    @classmethod
    def iota(cls, builder: Builder | None, shape: Shape, iota_dimension: int) -> Op:
        """0, 1, 2, … along a dimension."""
        from jax import lax

        from torch_xla.ops import dtypes

        dtype = dtypes.numpy_dtype(Op.to_torch_type(shape.dtype))
        return Op(lax.broadcasted_iota(dtype, shape.sizes, iota_dimension))

    scalar_like = _method("full_like", lambda self, value: (self, value))
    zeros_like = _method("full_like", lambda self: (self, 0))
    ones_like = _method("full_like", lambda self: (self, 1))

    @classmethod
    def to_torch_type(cls, dtype: str | None) -> torch.dtype:
        """The PyTorch dtype of an XLA type; float32 for None."""
        return XLA_TO_TORCH[dtype] if dtype else torch.float32

    @classmethod
    def from_torch_type(cls, dtype: torch.dtype) -> str:
        """The XLA type of a PyTorch dtype."""
        return TORCH_TO_XLA[dtype]
