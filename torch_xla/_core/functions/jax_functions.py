"""Records JAX functions as single operators (`xla::program`), and makes StableHLO modules of traced PyTorch graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_xla import _bindings, _events
from torch_xla._core.device import client, placement, transfer
from torch_xla._core.graph.library import XLA_LIB

# How many programs that call unknown functions on the host have a digest.
_unknown: dict[str, int] = {}


def install() -> None:
    """Registers the operator with PyTorch; called once, at import."""
    XLA_LIB.define("program(Tensor[] inputs, str program) -> Tensor[]")
    XLA_LIB.impl("program", _meta_kernel, "Meta")


def _meta_kernel(inputs: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    from torch_xla.ops import program as programs

    return [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in programs.find(program).outs]


def trace(function: Callable[..., Sequence[Any]], metas: Sequence[Any], label: str, wide: bool = True) -> str:
    """Traces a JAX function of one array for each `Meta`, to a sequence of arrays, and gives the name to `call` it by.

    Equal programs have equal names, in other processes too, unless they call functions on the host that nothing is
    known of: each such program has a name of its own. The label is what dumps and profiles call it; JAX's 64-bit types
    are on while it is traced, unless `wide` is False.
    """
    import jax

    from torch_xla._jax_internals import jaxpr_as_fun
    from torch_xla.ops import dtypes
    from torch_xla.ops.program import TracedProgram, register
    from torch_xla.ops.registry import Meta

    with jax.enable_x64(wide):
        arguments = [jax.ShapeDtypeStruct(m.shape, dtypes.numpy_dtype(m.dtype)) for m in metas]
        closed = jax.make_jaxpr(lambda *arrays: tuple(function(*arrays)))(*arguments)
        outs = tuple(Meta(tuple(aval.shape), dtypes.torch_dtype(aval.dtype)) for aval in closed.out_avals)
    program = TracedProgram(jaxpr_as_fun(closed), tuple(metas), outs)
    name = f"{label}:{_digest(_lowered_program(program), closed.jaxpr)}"
    register(name, program)
    return name


def _lowered_program(program: Any) -> Any:
    import jax

    from torch_xla.ops import dtypes

    platform = placement.of(_bindings.current_device()).platform  # a kernel for it may not be for others
    with client.x64():
        arguments = [jax.ShapeDtypeStruct(m.shape, dtypes.numpy_dtype(m.dtype)) for m in program.inputs]
        return jax.jit(program.function, keep_unused=True).trace(*arguments).lower(lowering_platforms=(platform,))


def _digest(stage: Any, jaxpr: Any) -> str:
    """A digest of a program: of all that it is lowered to, and of the functions that it calls on the host."""
    from torch_xla._core.lower import lowering
    from torch_xla._jax_internals import constants

    module = stage.compiler_ir("stablehlo")
    digest = hashlib.sha256(lowering.bytecode(module, locations=False))
    for constant in constants(stage):  # not part of the module where they are large
        digest.update(f"{constant.shape} {constant.dtype}".encode() + np.asarray(constant).tobytes())
    return digest.hexdigest()[:32] + _host_functions(stage, jaxpr, digest.hexdigest())


def _host_functions(stage: Any, jaxpr: Any, digest: str) -> str:
    """Tells programs apart that differ only in what they call on the host, of which the module says nothing."""
    from torch_xla._core.lower import lowering
    from torch_xla._jax_internals import all_eqns

    count = lowering.count_callbacks(stage)
    if not count:
        return ""
    parameters = (value for _, equation in all_eqns(jaxpr) for value in equation.params.values())
    functions: dict[int, Any] = {id(value): getattr(value, "callback_func", None) for value in parameters}
    callbacks = [f.identity for f in functions.values() if hasattr(f, "identity")]  # of `ops/fallback.py`
    if len(callbacks) == count:
        return "+" + hashlib.sha256(str(callbacks).encode()).hexdigest()[:16]
    _unknown[digest] = number = _unknown.get(digest, 0) + 1
    return f"+{number}"


def call(name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Records a call of a program that `trace` named, on tensors of the shapes and dtypes that it was traced for."""
    with torch.no_grad():
        return list(torch.ops.xla.program(list(inputs), name))


def text(name: str) -> str:
    """A registered program as StableHLO."""
    from torch_xla.ops.program import find

    return _lowered_program(find(name)).as_text()


def constant(value: Any) -> Hashable:
    """A key for a hashable argument that is no tensor: 1 differs from True, and from 1.0.

    0.0 is not -0.0.
    """
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def metas_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Shape and dtype of each tensor, as `trace` wants them."""
    from torch_xla.ops.registry import Meta

    return tuple(Meta(tuple(t.shape), t.dtype) for t in tensors)


@dataclass(frozen=True)
class ExportedModule:
    """A traced graph as a StableHLO module of MLIR's."""

    module: Any

    def __post_init__(self) -> None:
        from torch_xla.ops.composite import name_meanings

        name_meanings(self.module)

    def text(self) -> str:
        """The module for human eyes."""
        return self.module.operation.get_asm(enable_debug_info=False)

    def bytecode(self) -> bytes:
        """The module in binary form."""
        from torch_xla._core.lower import lowering

        return lowering.bytecode(self.module)


def export_module(
    module: torch.fx.GraphModule, outputs: Sequence[int], lift: bool, ranges: Mapping[Any, Any] | None = None
) -> tuple[ExportedModule, list[Any]]:
    """Lowers a traced graph by itself; gives its module, and the values of the numbers that are inputs of it.

    The inputs are the tensors among the placeholders that are used, then, with `lift`, the numbers but 0 and 1. It
    returns the results in `outputs` that are not None; `ranges` says what is known of sizes that are left open. Raises
    NotImplementedError where operators only run on the host.
    """
    import jax

    from torch_xla._core.functions import fx
    from torch_xla._core.functions.sizes import Sizes, is_open, lowered_open
    from torch_xla.ops import dtypes
    from torch_xla.ops.registry import StaticNumbers

    fx.check_exportable(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    used = [isinstance(node.meta.get("val"), torch.Tensor) and bool(node.users) for node in placeholders]
    values = [node.meta["val"] for node, is_used in zip(placeholders, used, strict=True) if is_used]
    sizes = Sizes(ranges)
    constant = fx.function_of(module, sizes)
    lower = lowered_open if any(map(is_open, values)) else _lowered

    def computing(function: fx.Function) -> Callable[..., Any]:
        def forward(*inputs: Any) -> tuple[Any, ...]:
            remaining_inputs = iter(inputs)
            arrays = [next(remaining_inputs) if is_used else None for is_used in used]
            results = function(*arrays, numbers=list(remaining_inputs))
            return tuple(jax.numpy.asarray(results[i]) for i in outputs if results[i] is not None)

        return forward

    with client.x64():
        arguments = [jax.ShapeDtypeStruct(sizes.shape(value), dtypes.numpy_dtype(value.dtype)) for value in values]
        if not lift:
            return ExportedModule(lower(computing(constant), arguments)), []
        static: set[str] = set()
        while True:
            function, numbers = constant.lifted(static)
            try:
                jax.eval_shape(computing(function), *arguments, *numbers)
                break
            except StaticNumbers as error:
                static.add(error.op)
        return ExportedModule(lower(computing(function), [*arguments, *numbers])), numbers


def _lowered(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    import jax

    return jax.jit(function, keep_unused=True).lower(*arguments).compiler_ir("stablehlo")


def as_numpy(tensor: torch.Tensor) -> Any:
    """A copy of a tensor's values as a NumPy array of the XLA dtype."""
    from torch_xla.ops.fallback import to_numpy

    return to_numpy(tensor.cpu()).copy()


def upload(array: Any) -> torch.Tensor:
    """A tensor on the current device with the values of a NumPy array."""
    from torch_xla.ops import dtypes

    index = _bindings.current_device()
    return _bindings.tensor_of(transfer.put(array, index), list(array.shape), dtypes.torch_dtype(array.dtype), index)


class LoadedModule:
    """A module compiled for a device; a call takes and returns a flat list of tensors.

    One that takes inputs of any size is compiled for each set of sizes that it meets.
    """

    def __init__(self, bytecode: bytes, index: int) -> None:
        from torch_xla._core.functions.sizes import has_open_sizes

        self._bytecode = bytecode
        self._index = index
        self._open = has_open_sizes(bytecode)
        self._compiled: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        from torch_xla._core.execute import barrier
        from torch_xla.ops import dtypes

        tensors = [t.detach().to(torch.device("xla", self._index)).contiguous() for t in inputs]
        loaded = self._executable(tuple(tuple(t.shape) for t in tensors) if self._open else ())
        buffers = barrier.buffers(tensors)
        with _events.timed("ExecuteTime"):
            results = loaded.execute_sharded(buffers)
        arrays = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        return [
            _bindings.tensor_of(array, list(array.shape), dtypes.torch_dtype(array.dtype), self._index)
            for array in arrays
        ]

    def _executable(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        from torch_xla._core.functions.sizes import specialised
        from torch_xla._jax_internals import xla_client

        if shapes not in self._compiled:
            module = specialised(self._bytecode, shapes) if self._open else self._bytecode
            devices = placement.of(self._index).local
            with _events.timed("CompileTime"):
                self._compiled[shapes] = devices[0].client.compile_and_load(
                    module, xla_client.DeviceList(devices), xla_client.CompileOptions()
                )
        return self._compiled[shapes]


def load_module(bytecode: bytes) -> LoadedModule:
    """Takes a StableHLO module, as bytecode or text in UTF-8, for the current device."""
    return LoadedModule(bytecode, _bindings.current_device())
