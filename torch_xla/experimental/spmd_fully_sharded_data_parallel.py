"""Fully sharded data parallel training by splits over a mesh, which XLA turns into gathers and scatters."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_xla._errors import message
from torch_xla.distributed import spmd
from torch_xla.distributed.fsdp import wrap
from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import require_forward


class SpmdFullyShardedDataParallel(wrap.Wrapping):
    """Marks the parameters of a module as split along axis ``fsdp`` of a mesh, each in its longest dimension.

    Args:
        module: The module; it is moved to the XLA device.
        mesh: The devices; the global mesh by default.
        shard_output: ``shard_output(output, mesh)`` marks the result; by default its first dimension is split.
        auto_wrap_policy: Which modules inside are wrapped too; see `torch_xla.distributed.fsdp.wrap`.
        auto_wrapper_callable: What wraps them; this class by default.
        extra_data_axis: A further axis of the mesh that the first dimension of the result is split over.

    Parameters that are split already stay as they are.

    Raises:
        ValueError: There is no mesh, or it has no such axes.
        RuntimeError: The module has no forward pass, or is of this class already.
    """

    _inside = "_orig_module"

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: spmd.Mesh | None = None,
        shard_output: Callable[[Any, spmd.Mesh], Any] | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        require_forward(module, SpmdFullyShardedDataParallel)
        active_mesh = mesh or spmd.get_global_mesh()
        if active_mesh is None:
            raise ValueError(message("fsdp", "mesh is None", do="pass a mesh or call set_global_mesh"))
        for axis in ("fsdp", extra_data_axis or "fsdp"):
            if axis not in (active_mesh.axis_names or ()):
                raise ValueError(
                    message("fsdp", f"a mesh with axes {active_mesh.axis_names}", expected=f"an axis {axis!r}")
                )
        super().__init__()
        if auto_wrap_policy is not None:
            options = {"mesh": active_mesh, "shard_output": shard_output}
            wrap.wrap_inside(module, auto_wrap_policy, auto_wrapper_callable, SpmdFullyShardedDataParallel, options)
        self._mesh, self._shard_output = active_mesh, shard_output
        self._output_axes = "fsdp" if extra_data_axis is None else (extra_data_axis, "fsdp")
        self._orig_module = module.to("xla")
        count = active_mesh.shape()["fsdp"]
        for param in module.parameters():
            if not spmd.XLAShardedTensor(param).sharding_spec:
                spmd.mark_sharding(param, active_mesh, _longest_split(param.shape, count))
        spmd.apply_backward_optimization_barrier(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with its result marked."""
        output = self.module(*args, **kwargs)
        if self._shard_output is not None:
            self._shard_output(output, self._mesh)
            return output
        first = output
        if isinstance(output, tuple):
            first = output[0]
            _warn_of_tuple()
        if not isinstance(first, torch.Tensor):
            raise RuntimeError(
                message("fsdp", f"the output is a {type(first).__name__}", expected="a tensor", do="give shard_output")
            )
        axes = (self._output_axes,) + (None,) * (first.dim() - 1)
        spmd.mark_sharding(first, self._mesh, axes if first.dim() else ())
        return output


def _longest_split(shape: torch.Size, count: int) -> tuple[str | None, ...]:
    """The longest dimension, or the longest that divides, is split."""
    dims = range(len(shape))
    split = max(dims, key=lambda dim: (shape[dim] % count == 0, shape[dim]), default=0)
    return tuple("fsdp" if dim == split else None for dim in dims)


@functools.cache
def _warn_of_tuple() -> None:
    text = "The output is a tuple, but only the first element is sharded"
    warnings.warn(message("fsdp", text, do="give shard_output to split the others"), stacklevel=3)
