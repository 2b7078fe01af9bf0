"""JAX functions in a recorded graph (each becomes one operator, `xla::program`), and modules by themselves.

A module is made from a traced PyTorch graph, or loaded from bytecode, and runs outside the recorder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla import _bindings, _metrics
from torch_xla._core.device import client, placement, transfer
from torch_xla._core.graph.library import XLA_LIB


def install() -> None:
    """Registers the operator with PyTorch; called once, at import."""
    XLA_LIB.define("program(Tensor[] inputs, str program) -> Tensor[]")
    XLA_LIB.impl("program", _promise, "Meta")


def _promise(inputs: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    from torch_xla.ops import program as programs

    return [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in programs.find(program).outs]


def trace(function: Callable[..., Sequence[Any]], metas: Sequence[Any], label: str, wide: bool = True) -> str:
    """Traces a JAX function and registers it.

    Args:
        function: Takes one array per entry of `metas` and returns a sequence of arrays.
        metas: Shape and dtype (`Meta`) of each argument.
        label: What the function is called in dumps and profiles.
        wide: Whether JAX's 64-bit types are on while it is traced.

    Returns:
        The name to `call` it by; equal programs have equal names, in other processes too.
    """
    import jax
    from jax.extend.core import jaxpr_as_fun

    from torch_xla.ops import dtypes
    from torch_xla.ops.program import Program, register
    from torch_xla.ops.registry import Meta

    with jax.enable_x64(wide):
        arguments = [jax.ShapeDtypeStruct(m.shape, dtypes.numpy_dtype(m.dtype)) for m in metas]
        closed = jax.make_jaxpr(lambda *arrays: tuple(function(*arrays)))(*arguments)
        digest = hashlib.sha256(str(closed.jaxpr).encode())
        for constant in closed.consts:
            digest.update(f"{constant.shape} {constant.dtype}".encode() + jax.device_get(constant).tobytes())
        outs = tuple(Meta(tuple(aval.shape), dtypes.torch_dtype(aval.dtype)) for aval in closed.out_avals)
    name = f"{label}:{digest.hexdigest()[:32]}"
    register(name, Program(jaxpr_as_fun(closed), tuple(metas), outs))
    return name


def call(name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Records a call of a registered program.

    Args:
        name: What `trace` returned.
        inputs: Tensors on one XLA device, of the shapes and dtypes it was traced for.
    """
    with torch.no_grad():
        return list(torch.ops.xla.program(list(inputs), name))


def text(name: str) -> str:
    """A registered program as StableHLO."""
    import jax

    from torch_xla.ops import dtypes
    from torch_xla.ops.program import find

    program = find(name)
    with client.x64():
        arguments = [jax.ShapeDtypeStruct(m.shape, dtypes.numpy_dtype(m.dtype)) for m in program.inputs]
        return jax.jit(program.function).lower(*arguments).as_text()


def metas_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Shape and dtype of each tensor, as `trace` wants them."""
    from torch_xla.ops.registry import Meta

    return tuple(Meta(tuple(t.shape), t.dtype) for t in tensors)


@dataclass(frozen=True)
class ExportedModule:
    """A traced graph as a StableHLO module.

    Attributes:
        module: MLIR's module.
    """

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
    """Lowers a traced graph by itself.

    Args:
        module: The graph.
        ranges: What is known of the sizes that its inputs leave open.
        outputs: Which of its results the module returns; those that are None are left out.
        lift: Whether its numbers, but 0 and 1, are inputs of the module.

    Returns:
        The module, whose inputs are the tensors among the placeholders that are used and then the numbers; and the
        numbers' values.

    Raises:
        NotImplementedError: The graph has operators that only run on the host.
    """
    import jax

    from torch_xla._core.functions import fx
    from torch_xla._core.functions.sizes import Sizes, is_open, lowered_open
    from torch_xla.ops import dtypes
    from torch_xla.ops.registry import StaticNumbers

    fx.check_exportable(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    used = [isinstance(node.meta.get("val"), torch.Tensor) and bool(node.users) for node in placeholders]
    values = [node.meta["val"] for node, taken in zip(placeholders, used, strict=True) if taken]
    sizes = Sizes(ranges)
    numbers = fx.Numbers() if lift else None
    function = fx.as_jax(module, numbers, sizes=sizes)
    lower = lowered_open if any(map(is_open, values)) else _lowered

    def forward(*inputs: Any) -> tuple[Any, ...]:
        given = iter(inputs)
        results = function(*(next(given) if taken else None for taken in used))
        return tuple(jax.numpy.asarray(results[i]) for i in outputs if results[i] is not None)

    with client.x64():
        arguments = [jax.ShapeDtypeStruct(sizes.shape(value), dtypes.numpy_dtype(value.dtype)) for value in values]
        if numbers is None:
            return ExportedModule(lower(forward, arguments)), []
        while True:
            try:
                numbers.start(None)
                jax.eval_shape(forward, *arguments)
                break
            except StaticNumbers:
                continue

        def lifted(*inputs: Any) -> tuple[Any, ...]:
            numbers.start(inputs[len(arguments) :])
            return forward(*inputs[: len(arguments)])

        lifted.__name__ = "forward"
        constants = list(numbers.arrays)
        return ExportedModule(lower(lifted, [*arguments, *constants])), constants


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
    """A compiled module; a call takes and returns a flat list of tensors.

    One that takes inputs of any size is compiled for each set of sizes that it meets.

    Args:
        bytecode: The module.
        index: The device to compile for.
    """

    def __init__(self, bytecode: bytes, index: int) -> None:
        from torch_xla._core.functions.sizes import has_open_sizes

        self._bytecode = bytecode
        self._index = index
        self._open = has_open_sizes(bytecode)
        self._compiled: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        from torch_xla._core import sync
        from torch_xla.ops import dtypes

        tensors = [t.detach().to(torch.device("xla", self._index)).contiguous() for t in inputs]
        loaded = self._executable(tuple(tuple(t.shape) for t in tensors) if self._open else ())
        buffers = sync.buffers(tensors)
        with _metrics.timed("ExecuteTime"):
            results = loaded.execute_sharded(buffers)
        arrays = [shards[0] for shards in results.disassemble_into_single_device_arrays()]
        return [
            _bindings.tensor_of(array, list(array.shape), dtypes.torch_dtype(array.dtype), self._index)
            for array in arrays
        ]

    def _executable(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        from jaxlib import xla_client

        from torch_xla._core.functions.sizes import specialised

        if shapes not in self._compiled:
            module = specialised(self._bytecode, shapes) if self._open else self._bytecode
            devices = placement.of(self._index).local
            with _metrics.timed("CompileTime"):
                self._compiled[shapes] = devices[0].client.compile_and_load(
                    module, xla_client.DeviceList(devices), xla_client.CompileOptions()
                )
        return self._compiled[shapes]


def load_module(bytecode: bytes) -> LoadedModule:
    """Takes a StableHLO module for the current device.

    Args:
        bytecode: The module, or its text in UTF-8.
    """
    return LoadedModule(bytecode, _bindings.current_device())
