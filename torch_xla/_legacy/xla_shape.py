"""XLA's element types and shapes, as `xla_builder` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_xla._errors import message
from torch_xla.ops.xla_types import XLA_NAMES

TORCH_TO_XLA = XLA_NAMES
XLA_TO_TORCH = {name: dtype for dtype, name in XLA_NAMES.items()}
# ``Type.F32`` is ``"f32"``, and so on.
Type: Any = type("Type", (), {name.upper(): name for name in XLA_TO_TORCH})


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
