"""`xla::custom_call`, the operator behind custom calls, also while PyTorch traces: a call says what it gives."""

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
                message("custom_call", f"got {node.target} with {node.args} {node.kwargs}", expected="tensors alone")
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
    """What a node of a traced graph gives."""
    value = node.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else list(value)


def install() -> None:
    """Registers the operator with PyTorch; called once, at import."""
    XLA_LIB.define(
        "custom_call(Tensor[] inputs, str call_target, str[] results, bool has_side_effect, str backend_config, "
        "int api_version, str[] frontend_attributes) -> Tensor[]"
    )
    XLA_LIB.impl("custom_call", _promise, "Meta")


def _promise(inputs: list[torch.Tensor], call_target: str, results: list[str], *rest: object) -> list[torch.Tensor]:
    meta_tensors = []
    for text in results:
        dtype, *sizes = text.split()
        meta_tensors.append(torch.empty([int(size) for size in sizes], dtype=getattr(torch, dtype), device="meta"))
    return meta_tensors


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A result as the operator takes it: schemas of PyTorch have no lists of shapes or dtypes."""
    return " ".join([str(dtype).removeprefix("torch."), *(str(int(size)) for size in shape)])


def call(
    inputs: Sequence[torch.Tensor],
    target: str,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    frontend_attributes: Mapping[str, str] | None = None,
) -> list[torch.Tensor]:
    """Records a custom call of tensors on one XLA device, at least one, without gradients.

    The backend must know the target when the program is compiled; the parameters are those of `stablehlo_custom_call`,
    and so are the errors.
    """
    if not inputs:
        raise ValueError(message("custom_call", f"got no inputs for {target!r}", expected="at least one tensor"))
    if len(shapes) != len(dtypes) or not shapes:
        raise ValueError(
            message(
                "custom_call",
                f"got {len(shapes)} shapes and {len(dtypes)} dtypes of the results of {target!r}",
                expected="as many of both, at least one",
            )
        )
    if api_version not in _VERSIONS:
        raise ValueError(message("custom_call", f"got api_version={api_version}", expected="0 to 4"))
    results = [described(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    attributes = [text for pair in sorted((frontend_attributes or {}).items()) for text in pair]
    with torch.no_grad():
        return list(
            torch.ops.xla.custom_call(
                list(inputs), target, results, has_side_effect, backend_config, api_version, attributes
            )
        )
