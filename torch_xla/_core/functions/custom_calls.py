"""Has `xla::custom_call`, the operator behind custom calls, also while PyTorch traces."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set

import torch

from torch_xla._core.graph.library import XLA_LIB
from torch_xla._errors import message

_VERSIONS = range(5)  # XLA's calling conventions


def put_into(module: torch.fx.GraphModule, namespaces: Set[str]) -> None:
    """Makes custom calls of a traced graph's operators of some namespaces, such as ``{"my_library"}``, by their names.

    Raises NotImplementedError where one takes or gives something that is no tensor.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", None) not in namespaces:
            continue
        values = values_of(node)
        operands = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in node.args]
        if node.kwargs or not all(isinstance(x, torch.Tensor) for x in (*operands, *values)):
            raise NotImplementedError(
                message(
                    "custom_call",
                    f"got {node.target} with {node.args} {node.kwargs}",
                    expected="tensors alone",
                    do="pass numbers as tensors, or bind them into the function",
                )
            )
        results = [described(value.shape, value.dtype) for value in values]
        with graph.inserting_before(node):
            call_node = graph.call_function(
                torch.ops.xla.custom_call.default, (list(node.args), str(node.target), results, False, "", 0, [])
            )
            call_node.meta["val"] = values
            replacement = call_node
            if isinstance(node.meta["val"], torch.Tensor):
                replacement = graph.call_function(operator.getitem, (call_node, 0))
                replacement.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    module.recompile()


def values_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """The result tensors of a node of a traced graph."""
    value = node.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else list(value)


def install() -> None:
    """Registers the operator with PyTorch; called once, at import."""
    XLA_LIB.define(
        "custom_call(Tensor[] inputs, str call_target, str[] results, bool has_side_effect, str backend_config, "
        "int api_version, str[] frontend_attributes) -> Tensor[]"
    )
    XLA_LIB.impl("custom_call", _meta_kernel, "Meta")


def _meta_kernel(inputs: list[torch.Tensor], call_target: str, results: list[str], *rest: object) -> list[torch.Tensor]:
    meta_tensors = []
    for text in results:
        dtype, *sizes = text.split()
        meta_tensors.append(torch.empty([int(size) for size in sizes], dtype=getattr(torch, dtype), device="meta"))
    return meta_tensors


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A result as the operator takes it: schemas of PyTorch have no lists of shapes or dtypes."""
    return " ".join([str(dtype).removeprefix("torch."), *(str(int(size)) for size in shape)])


def stablehlo_custom_call(
    args: Sequence[torch.Tensor],
    call_target: str,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[torch.dtype],
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    frontend_attributes: Mapping[str, str] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Calls what a backend, or whoever takes an exported module, knows under a name; it has no gradients.

    Args:
        args: Tensors on one XLA device, at least one.
        call_target: The name. Targets of one's own are registered with JAX, by `jax.ffi.register_ffi_target`.
        output_shapes: Shape of each result.
        output_dtypes: Dtype of each result.
        has_side_effect: Whether the call is kept although the program does not use its results.
        backend_config: What the target is told: any text; with `api_version` 4, a dictionary in MLIR's notation.
        api_version: Number of the calling convention in XLA, 0 to 4; 4 is that of `jax.ffi`.
        frontend_attributes: Names and values that XLA's passes may look for.

    Returns:
        The result, or a list if there are several.

    Raises:
        ValueError: There are no tensors or no results, not as many shapes as dtypes, or no such calling convention.
    """
    if not args:
        raise ValueError(message("custom_call", f"got no inputs for {call_target!r}", expected="at least one tensor"))
    if len(output_shapes) != len(output_dtypes) or not output_shapes:
        raise ValueError(
            message(
                "custom_call",
                f"got {len(output_shapes)} shapes and {len(output_dtypes)} dtypes of the results of {call_target!r}",
                expected="as many of both, at least one",
            )
        )
    if api_version not in _VERSIONS:
        raise ValueError(message("custom_call", f"got api_version={api_version}", expected="0 to 4"))
    results = [described(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    attributes = [text for pair in sorted((frontend_attributes or {}).items()) for text in pair]
    with torch.no_grad():
        outputs: list[torch.Tensor] = torch.ops.xla.custom_call(
            list(args), call_target, results, has_side_effect, backend_config, api_version, attributes
        )
    return outputs[0] if len(outputs) == 1 else outputs
