"""Translates dynamic shapes of `torch.export` (`Dim`) to JAX's symbolic dimensions, and loads such modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from torch_xla._core.lower import lowering
from torch_xla._errors import message
from torch_xla._torch_internals import SymT, symbol_is_type
from torch_xla._torch_internals import functions as sympy_functions

_INFINITE = 2**31  # bounds from there on are none: sizes are 32-bit numbers in the module
_MAIN = "dynamic_main"


class Sizes:
    """Translates PyTorch's symbolic sizes; equal symbols become the same dimension variable.

    `ranges` has the values that symbols may have, as an exported program lists them; those of sizes that depend on
    values are passed over.
    """

    def __init__(self, ranges: Mapping[Any, Any] | None = None) -> None:
        items = (ranges or {}).items()
        self._ranges = {symbol: bounds for symbol, bounds in items if not symbol_is_type(symbol, SymT.UNBACKED_INT)}
        self._variables: dict[str, Any] | None = None

    def shape(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The sizes of a tensor: numbers, and JAX's dimension expressions."""
        return tuple(map(self.of, tensor.shape))

    def of(self, size: int | torch.SymInt) -> Any:
        """A size: a number, or a dimension expression of JAX."""
        if isinstance(size, int):
            return size
        return self._expression(size.node.expr)

    def _variable(self, name: str) -> Any:
        from jax import export

        if self._variables is None:
            names = [str(symbol) for symbol in self._ranges]
            limits = []
            for symbol, bounds in self._ranges.items():
                if 1 < bounds.lower < _INFINITE:
                    limits.append(f"{symbol} >= {int(bounds.lower)}")
                if bounds.upper < _INFINITE:
                    limits.append(f"{symbol} <= {int(bounds.upper)}")
            scope = export.SymbolicScope(limits)
            dims = export.symbolic_shape(", ".join(names), scope=scope) if names else ()
            self._variables = dict(zip(names, dims, strict=True))
        if name not in self._variables:
            raise NotImplementedError(
                message("stablehlo", f"got size {name}, which depends on values", expected="sizes of the inputs")
            )
        return self._variables[name]

    def _expression(self, expression: Any) -> Any:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Symbol):
            return self._variable(str(expression))
        for kind, combine in _COMBINED.items():
            if isinstance(expression, kind):
                return combine([self._expression(argument) for argument in expression.args])
        raise NotImplementedError(
            message("stablehlo", f"got size {expression}", expected="sums, products and quotients of inputs' sizes")
        )


def _power(parts: Sequence[Any]) -> Any:
    base, exponent = parts
    return base**exponent


def _larger(parts: Sequence[Any]) -> Any:
    from jax.core import max_dim

    return reduce(max_dim, parts)


def _smaller(parts: Sequence[Any]) -> Any:
    from jax.core import min_dim

    return reduce(min_dim, parts)


_COMBINED: dict[Any, Callable[[Sequence[Any]], Any]] = {
    sympy.Add: lambda parts: reduce(lambda x, y: x + y, parts),
    sympy.Mul: lambda parts: reduce(lambda x, y: x * y, parts),
    sympy.Pow: _power,
    (sympy_functions.FloorDiv, sympy_functions.CleanDiv): lambda parts: parts[0] // parts[1],
    (sympy_functions.PythonMod, sympy_functions.Mod): lambda parts: parts[0] % parts[1],
    (sympy.Max, sympy_functions.Max): _larger,
    (sympy.Min, sympy_functions.Min): _smaller,
}


def is_open_size(value: Any) -> bool:
    """Whether a value is a size that `Sizes` has translated and that is no number."""
    from jax.export import is_symbolic_dim

    return is_symbolic_dim(value)


def is_open(tensor: Any) -> bool:
    """Whether a tensor of a traced graph has a size that is left open."""
    return isinstance(tensor, torch.Tensor) and any(not isinstance(size, int) for size in tensor.shape)


def lowered_open(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Lowers a JAX function of arrays, or of shapes, with `Sizes` for what is open, and dtypes.

    Gives MLIR's module, which checks the sizes against the ranges.
    """
    import jax
    from jax import export

    from torch_xla._jax_internals import ir

    try:
        exported = export.export(jax.jit(function, keep_unused=True))(*arguments)
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in ("host_callbacks", "std::bad_cast")):  # of a call of the host
            raise
        raise NotImplementedError(
            message(
                "stablehlo",
                "got an operator whose lowering needs the sizes that are left open, which stderr names",
                do="export with fixed sizes, or with other operators",
            )
        ) from None
    with _context():
        return ir.Module.parse(str(exported.mlir_module()))


def has_open_sizes(bytecode: bytes) -> bool:
    """Whether a module takes inputs of any size."""
    from torch_xla._jax_internals import ir

    with _context():
        main = _main_of(ir.Module.parse(bytecode))
        return not all(ir.RankedTensorType(kind).has_static_shape for kind in main.type.inputs)


def _context() -> Any:
    from jax.interpreters import mlir

    return mlir.make_ir_context()


def _main_of(module: Any) -> Any:
    from torch_xla._jax_internals import ir

    return ir.SymbolTable(module.operation)["main"]


def specialised(bytecode: bytes, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """A module with open sizes for inputs of these shapes, as StableHLO without open sizes.

    A function of fixed sizes is put before the module's own, and XLA carries the sizes through. Raises ValueError where
    sizes that should be equal are not, or one is outside its range.
    """
    from torch_xla._jax_internals import func as functions
    from torch_xla._jax_internals import ir, mlir
    from torch_xla._jax_internals import stablehlo as hlo

    func: Any = functions  # its stubs lack what MLIR adds to the classes
    with _context(), ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        inner = _main_of(module)
        inner.attributes["sym_name"] = ir.StringAttr.get(_MAIN)
        inner.attributes["sym_visibility"] = ir.StringAttr.get("private")
        kinds = [ir.RankedTensorType(kind) for kind in inner.type.inputs]
        fixed = [ir.RankedTensorType.get(shape, kind.element_type) for kind, shape in zip(kinds, shapes, strict=True)]
        results = list(inner.type.results)
        with ir.InsertionPoint(module.body):
            outer = func.FuncOp("main", ir.FunctionType.get(fixed, results), visibility="public")
        with ir.InsertionPoint(outer.add_entry_block()):
            opened = [
                argument if argument.type == kind else hlo.ConvertOp(kind, argument).result
                for argument, kind in zip(outer.arguments, kinds, strict=True)
            ]
            func.ReturnOp(func.CallOp(results, ir.FlatSymbolRefAttr.get(_MAIN), opened).results)
        module_bytes = lowering.bytecode(module)
    try:
        return mlir.refine_polymorphic_shapes(
            mlir_module=module_bytes, enable_shape_assertions=True, validate_static_shapes=True, enable_shardy=True
        )
    except Exception as error:
        match = re.search(r"Input shapes do not match the \w+ shapes? \w+(?: [^.]*)?\.", str(error))
        reason = match[0] if match else str(error).strip()
        raise ValueError(
            message(
                "stablehlo",
                f"got sizes that the exported module does not take: {reason}",
                do="pass inputs whose sizes fit the dynamic shapes of the export, or export again",
            )
        ) from None
