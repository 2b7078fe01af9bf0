"""XLA's element types and shapes, as `xla_builder` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla._errors import message


class Type:
    """XLA's names of element types."""

    F32 = "f32"
    F64 = "f64"
    BF16 = "bf16"
    F16 = "f16"
    U8 = "u8"
    S8 = "s8"
    U16 = "u16"
    S16 = "s16"
    U32 = "u32"
    S32 = "s32"
    U64 = "u64"
    S64 = "s64"
    C64 = "c64"
    C128 = "c128"
    PRED = "pred"


XLA_TO_TORCH = {
    Type.F32: torch.float32,
    Type.F64: torch.float64,
    Type.BF16: torch.bfloat16,
    Type.F16: torch.float16,
    Type.U8: torch.uint8,
    Type.S8: torch.int8,
    Type.U16: torch.uint16,
    Type.S16: torch.int16,
    Type.U32: torch.uint32,
    Type.S32: torch.int32,
    Type.U64: torch.uint64,
    Type.S64: torch.int64,
    Type.C64: torch.complex64,
    Type.C128: torch.complex128,
    Type.PRED: torch.bool,
}
TORCH_TO_XLA = {dtype: name for name, dtype in XLA_TO_TORCH.items()}


class Shape:
    """Element type and sizes of a value, or a list of such for a tuple."""

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    @classmethod
    def create(cls, dtype: str, sizes: Sequence[int], dynamic_dimensions: Sequence[bool] | None = None) -> Shape:
        """The shape of an array of one `Type`; dynamic dimensions must be None, sizes are fixed."""
        if dynamic_dimensions is not None and any(dynamic_dimensions):
            raise NotImplementedError(message("xla_builder", "got dynamic dimensions", expected="fixed sizes"))
        return Shape({"type": str(dtype), "sizes": tuple(sizes)})

    @property
    def shape(self) -> Any:
        """``{"type": …, "sizes": …}``, or a list of them."""
        return self._shape

    def is_tuple(self) -> bool:
        """Whether it is the shape of a tuple."""
        return isinstance(self._shape, (list, tuple))

    def tuple_size(self) -> int:
        """Number of the tuple's elements."""
        return len(self._shape)

    def tuple_shape(self, index: int) -> Any:
        """Shape of one of the tuple's elements."""
        return self._shape[index]

    def is_dynamic(self) -> bool:
        """Always False."""
        return False

    def as_scalar(self) -> Shape:
        """A scalar of the same type."""
        return Shape.create(self.dtype, ())

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self._shape["sizes"]

    @property
    def dynamic_dimensions(self) -> None:
        """Always None."""
        return None

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self._shape["type"]
