"""`Op`: a value inside an XLA computation that is written in Python, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla._core.functions import programs
from torch_xla._errors import message
from torch_xla._legacy.xla_shape import TORCH_TO_XLA, XLA_TO_TORCH, Shape


class Builder:
    """The computation an `Op` belongs to; carries nothing but a name."""

    def __init__(self, name: str) -> None:
        self.name = name


def _lax(name: str, *operands: Any, **options: Any) -> Op:
    """Calls a function of `jax.lax` with the ops' arrays."""
    from jax import lax

    return Op(getattr(lax, name)(*(o.op if isinstance(o, Op) else o for o in operands), **options))


def _unary(name: str) -> Callable[[Op], Op]:
    def method(self: Op) -> Op:
        return _lax(name, self)

    method.__name__ = name
    method.__doc__ = f"`jax.lax.{name}` of each element."
    return method


def _arrays(op: Any) -> Any:
    """Ops as arrays, tuples as tuples of them."""
    if isinstance(op, Op):
        return op.op
    if isinstance(op, (list, tuple)):
        return tuple(_arrays(o) for o in op)
    return op


def _combiner(computation: Callable[..., Any]) -> Callable[..., Any]:
    """A function over ops as a function over arrays."""

    def combine(*values: Any) -> Any:
        return _arrays(computation(*(Op(v) for v in values)))

    return combine


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
        """What constants of the same computation are made with."""
        return Builder("computation")

    # Arithmetic: both operands have one type.

    def __add__(self, rhs: Op) -> Op:
        return _lax("add", self, rhs)

    def __sub__(self, rhs: Op) -> Op:
        return _lax("sub", self, rhs)

    def __mul__(self, rhs: Op) -> Op:
        return _lax("mul", self, rhs)

    def __matmul__(self, rhs: Op) -> Op:
        return _lax("dot", self, rhs)

    def __truediv__(self, rhs: Op) -> Op:
        return _lax("div", self, rhs)

    def __pow__(self, rhs: Op) -> Op:
        return _lax("pow", self, rhs)

    def __mod__(self, rhs: Op) -> Op:
        return _lax("rem", self, rhs)

    def __neg__(self) -> Op:
        return _lax("neg", self)

    def __not__(self) -> Op:
        return _lax("bitwise_not", self)

    __invert__ = __not__

    def __and__(self, rhs: Op) -> Op:
        return _lax("bitwise_and", self, rhs)

    def __or__(self, rhs: Op) -> Op:
        return _lax("bitwise_or", self, rhs)

    def __xor__(self, rhs: Op) -> Op:
        return _lax("bitwise_xor", self, rhs)

    def __eq__(self, rhs: Op) -> Op:  # type: ignore[override]
        return _lax("eq", self, rhs)

    def __ne__(self, rhs: Op) -> Op:  # type: ignore[override]
        return _lax("ne", self, rhs)

    __hash__ = object.__hash__

    def __le__(self, rhs: Op) -> Op:
        return _lax("le", self, rhs)

    def __lt__(self, rhs: Op) -> Op:
        return _lax("lt", self, rhs)

    def __ge__(self, rhs: Op) -> Op:
        return _lax("ge", self, rhs)

    def __gt__(self, rhs: Op) -> Op:
        return _lax("gt", self, rhs)

    def __lshift__(self, rhs: Op) -> Op:
        return _lax("shift_left", self, rhs)

    def __rshift__(self, rhs: Op) -> Op:
        import jax.numpy as jnp

        unsigned = jnp.issubdtype(self.op.dtype, jnp.unsignedinteger)
        return _lax("shift_right_logical" if unsigned else "shift_right_arithmetic", self, rhs)

    def atan2(self, other: Op) -> Op:
        """Angle of the point (other, self)."""
        return _lax("atan2", self, other)

    def max(self, other: Op) -> Op:
        """The greater of both, by element."""
        return _lax("max", self, other)

    def min(self, other: Op) -> Op:
        """The lesser of both, by element."""
        return _lax("min", self, other)

    def clamp(self, min_value: Op, max_value: Op) -> Op:
        """Values cut off at both bounds."""
        return _lax("clamp", min_value, self, max_value)

    def select(self, true_value: Op, false_value: Op) -> Op:
        """Where this is true the one value, else the other."""
        return _lax("select", self, true_value, false_value)

    acos = _unary("acos")
    asin = _unary("asin")
    atan = _unary("atan")
    ceil = _unary("ceil")
    clz = _unary("clz")
    conj = _unary("conj")
    cos = _unary("cos")
    cosh = _unary("cosh")
    erf = _unary("erf")
    erfc = _unary("erfc")
    erfinf = _unary("erf_inv")
    exp = _unary("exp")
    expm1 = _unary("expm1")
    floor = _unary("floor")
    imag = _unary("imag")
    log = _unary("log")
    log1p = _unary("log1p")
    real = _unary("real")
    rsqrt = _unary("rsqrt")
    sin = _unary("sin")
    sinh = _unary("sinh")
    sqrt = _unary("sqrt")
    tan = _unary("tan")
    tanh = _unary("tanh")

    # Form.

    def reshape(
        self, sizes: Sequence[int], dimensions: Sequence[int] | None = None, inferred_dimension: int | None = None
    ) -> Op:
        """The values in another form, read in the order of `dimensions`."""
        return _lax("reshape", self, new_sizes=tuple(sizes), dimensions=dimensions and tuple(dimensions))

    def broadcast(self, sizes: Sequence[int]) -> Op:
        """Copies along new leading dimensions."""
        return _lax("broadcast", self, sizes=tuple(sizes))

    def broadcast_in_dim(self, sizes: Sequence[int], dimensions: Sequence[int]) -> Op:
        """Copies along new dimensions; `dimensions` says where the present ones go."""
        return _lax("broadcast_in_dim", self, shape=tuple(sizes), broadcast_dimensions=tuple(dimensions))

    def transpose(self, permutation: Sequence[int]) -> Op:
        """Dimensions in another order."""
        return _lax("transpose", self, permutation=tuple(permutation))

    def rev(self, dimensions: Sequence[int]) -> Op:
        """The elements of some dimensions in reverse order."""
        return _lax("rev", self, dimensions=tuple(dimensions))

    def slice(
        self, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Sequence[int] | None = None
    ) -> Op:
        """A part with fixed bounds."""
        return _lax("slice", self, start_indices, limit_indices, strides)

    def slice_in_dim(self, start_index: int, limit_index: int, dimno: int, stride: int = 1) -> Op:
        """A part of one dimension."""
        return _lax("slice_in_dim", self, start_index, limit_index, stride, dimno)

    def dynamic_slice(self, start_indices: Sequence[Op], slice_sizes: Sequence[int]) -> Op:
        """A part that starts at computed indices."""
        return _lax("dynamic_slice", self, _arrays(start_indices), tuple(slice_sizes))

    def dynamic_update_slice(self, update: Op, start_indices: Sequence[Op]) -> Op:
        """The values with a part overwritten, which starts at computed indices."""
        return _lax("dynamic_update_slice", self, update, _arrays(start_indices))

    def pad(self, value: Op, config: Sequence[tuple[int, int, int]]) -> Op:
        """A margin of `value`: (low, high, interior) by dimension."""
        return _lax("pad", self, value, tuple(tuple(c) for c in config))

    def cast(self, to_type: str) -> Op:
        """Values of another type."""
        from torch_xla.ops import dtypes

        return Op(dtypes.cast(self.op, Op.to_torch_type(to_type)))

    def bitcast(self, to_type: str) -> Op:
        """The same bits as another type."""
        from torch_xla.ops import dtypes

        return _lax("bitcast_convert_type", self, dtypes.numpy_dtype(Op.to_torch_type(to_type)))

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
        return Op(
            _convolution(
                self.op,
                kernel.op,
                window_strides,
                padding,
                lhs_dilation,
                rhs_dilation,
                dimensions,
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

    def reduce_window(
        self,
        init_value: Op,
        computation: Callable[..., Op],
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: str = "valid",
    ) -> Op:
        """Combines the values of each window."""
        combine = _combiner(computation)
        return _lax(
            "reduce_window", self, init_value, combine, tuple(window_dimensions), tuple(window_strides), padding.upper()
        )

    def reduce(self, init_value: Op, computation: Callable[..., Op], dimensions: Sequence[int]) -> Op:
        """Combines the values along some dimensions."""
        return _lax("reduce", self, init_value, _combiner(computation), tuple(dimensions))

    def reduce_all(self, init_value: Op, computation: Callable[..., Op]) -> Op:
        """Combines all values."""
        return self.reduce(init_value, computation, range(self.op.ndim))

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
        """Calls the one computation where this is true, else the other.

        Args:
            true_operand: Argument of the one.
            false_operand: Argument of the other.
            true_computation: Function of the operand, or of its elements if it is a tuple.
            false_computation: Likewise.
        """
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

    @classmethod
    def concat_in_dim(cls, ops: Sequence[Op], dimension: int, builder: Builder | None = None) -> Op:
        """Values one behind the other."""
        return _lax("concatenate", _arrays(ops), dimension)

    @classmethod
    def sort(cls, ops: Sequence[Op], comparator: Any, dimension: int = -1, is_stable: bool | None = None) -> Op:
        """Sorts all values by the first, ascending; `comparator` must be None."""
        if comparator is not None:
            raise NotImplementedError(message("xla_builder", "got a comparator", expected="None: ascending order"))
        return _lax("sort", _arrays(ops), dimension=dimension, is_stable=bool(is_stable))

    # Values from nothing.

    @classmethod
    def constant(cls, builder: Builder | None, value: torch.Tensor) -> Op:
        """The values of a CPU tensor."""
        import jax.numpy as jnp

        return Op(jnp.asarray(programs.as_numpy(value)))

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
        from torch_xla.ops import dtypes

        return _lax("broadcasted_iota", dtypes.numpy_dtype(Op.to_torch_type(shape.dtype)), shape.sizes, iota_dimension)

    def scalar_like(self, value: Any) -> Op:
        """A number everywhere, in this value's form."""
        return _lax("full_like", self, value)

    def zeros_like(self) -> Op:
        """Zeros in this value's form."""
        return self.scalar_like(0)

    def ones_like(self) -> Op:
        """Ones in this value's form."""
        return self.scalar_like(1)

    @classmethod
    def to_torch_type(cls, dtype: str | None) -> torch.dtype:
        """The PyTorch dtype of an XLA type; float32 for None."""
        return XLA_TO_TORCH[dtype] if dtype else torch.float32

    @classmethod
    def from_torch_type(cls, dtype: torch.dtype) -> str:
        """The XLA type of a PyTorch dtype."""
        return TORCH_TO_XLA[dtype]


def _convolution(
    x: Any,
    kernel: Any,
    strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimensions: dict[str, Any],
    feature_groups: int,
    batch_groups: int,
) -> Any:
    from jax import lax

    def order(kind: str, first: str, second: str, default: tuple[int, int]) -> tuple[int, ...]:
        spatial = dimensions.get(f"{kind}_spatial_dimensions", range(2, x.ndim))
        return (
            dimensions.get(f"{kind}_{first}_dimension", default[0]),
            dimensions.get(f"{kind}_{second}_dimension", default[1]),
            *spatial,
        )

    return lax.conv_general_dilated(
        x,
        kernel,
        tuple(strides),
        padding.upper() if isinstance(padding, str) else padding,
        lhs_dilation,
        rhs_dilation,
        lax.ConvDimensionNumbers(
            order("input", "batch", "feature", (0, 1)),
            order("kernel", "output_feature", "input_feature", (0, 1)),
            order("output", "batch", "feature", (0, 1)),
        ),
        feature_groups,
        batch_groups,
    )
