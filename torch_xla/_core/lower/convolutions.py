"""Rules out the shardings of convolutions that XLA's partitioner computes wrongly, in programs over a mesh.

If an image is sharded along its spatial dimensions, and the kernel along any, XLA sums over all devices, replicas
included: the result is too large by the number of replicas. Gradients of grouped kernels have that error. XLA aborts
the process at some gradients of sharded images, and where the channels of a grouped convolution are sharded over a part
of the mesh. So the spatial dimensions of images and windows are constrained to be unsharded; with feature groups all
dimensions but the batch are; with batch groups all are. XLA may choose the sharding of the others.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch_xla._jax_internals import ir, sdy, stablehlo

_MESH, _CONVOLUTION = "sdy.mesh", "stablehlo.convolution"


def constrain(module: Any) -> None:
    """Says of each convolution's operands and result in which dimensions they are whole, in a program over a mesh."""
    operations = _find(module)
    if not operations[_MESH]:
        return
    mesh = ir.StringAttr(operations[_MESH][0].attributes["sym_name"]).value
    with module.context:
        for convolution in operations[_CONVOLUTION]:
            image, kernel, result = _unsharded_dims(convolution)
            with ir.InsertionPoint(convolution), convolution.location:
                convolution.operands[0] = _constrained(convolution.operands[0], image, mesh)
                convolution.operands[1] = _constrained(convolution.operands[1], kernel, mesh)
            with ir.InsertionPoint.after(convolution), convolution.location:
                constrained_result = _constrained(convolution.results[0], result, mesh)
                convolution.results[0].replace_all_uses_except(constrained_result, constrained_result.owner.operation)


def _find(module: Any) -> dict[str, list[Any]]:
    operations: dict[str, list[Any]] = {_MESH: [], _CONVOLUTION: []}

    def take(operation: Any) -> Any:
        if operation.name in operations:
            operations[operation.name].append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(take)
    return operations


def _unsharded_dims(convolution: Any) -> tuple[Container[int], Container[int], Container[int]]:
    """The dimensions of image, kernel and result that are to be whole."""
    dims = stablehlo.ConvDimensionNumbers(convolution.attributes["dimension_numbers"])
    every = set(range(ir.RankedTensorType(convolution.results[0].type).rank))
    if ir.IntegerAttr(convolution.attributes["batch_group_count"]).value > 1:
        return every, every, every
    if ir.IntegerAttr(convolution.attributes["feature_group_count"]).value > 1:
        return every - {dims.input_batch_dimension}, every, every - {dims.output_batch_dimension}
    return dims.input_spatial_dimensions, dims.kernel_spatial_dimensions, dims.output_spatial_dimensions


def _constrained(value: Any, unsharded_dims: Container[int], mesh: str) -> Any:
    rank = ir.RankedTensorType(value.type).rank
    dims = [sdy.DimensionShardingAttr.get([], is_closed=d in unsharded_dims) for d in range(rank)]
    return sdy.ShardingConstraintOp(value, sdy.TensorShardingAttr.get(mesh, dims)).result
