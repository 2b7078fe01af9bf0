"""The wrapper that splits a module's parameters over processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

import torch_xla
from torch_xla import runtime
from torch_xla._errors import message
from torch_xla._torch_internals import pytree
from torch_xla.core import xla_model as xm
from torch_xla.core._collectives import check_groups, own_group
from torch_xla.distributed.fsdp import _shards, wrap
from torch_xla.distributed.fsdp.utils import INNER_FORWARD
from torch_xla.distributed.fsdp.xla_flatten_params_wrapper import INSIDE, XlaFlattenParamsWrapper

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require_forward(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Raises for modules that cannot be called, and for those that have the wrapper already."""
    if isinstance(module, wrapper):
        raise RuntimeError(message("fsdp", "Cannot wrap a module that is already wrapped with FSDP"))
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise RuntimeError(
            message("fsdp", f"{type(module).__name__} has no forward", do="wrap the modules inside, or what holds it")
        )


class XlaFullyShardedDataParallel(wrap.Wrapping):
    """Runs a module whose parameters are split over processes; with one process they are whole.

    All processes must have the same parameters when they wrap them, and split, run and train alike. Where a parameter
    is read, it is gathered; the gradient of this process's part is the average over the processes.

    Args:
        module: The module; it is moved to the current XLA device. Parameters on device meta are made first.
        reshard_after_forward: Whether parameters are gathered again in the backward pass, and not kept for it.
        flatten_parameters: Whether the parameters of a wrapper are gathered as one tensor.
        execute_sharding_on_init: Whether shards are computed at once, so that whole parameters are freed.
        optimization_barrier_in_forward: Whether parameters are gathered only when the module's input is there.
        optimization_barrier_in_backward: Accepted for compatibility: collectives run in the order of recording.
        sync_on_finalization: Whether a backward pass ends with a barrier.
        disable_reshard_on_root: Whether the outermost wrapper keeps its parameters for the backward pass.
        compute_dtype: Type to which parameters and floating inputs are cast for the computation.
        buffer_dtype: Type of floating buffers; ``compute_dtype`` by default.
        fp32_reduce_scatter: Whether gradients are reduced in float32 even if ``compute_dtype`` is another.
        sharding_groups: Lists of ordinals that share parameters.
        sharding_rank: Rank of this process in its group.
        sharding_world_size: Number of processes of a group.
        shard_param_on_dim_0: Whether parameters are split by rows, and not by elements.
        pin_layout_in_collective_ops: Accepted for compatibility.
        reduce_scatter_bucket_size_mb: Accepted for compatibility; see ``flatten_parameters``.
        coalesce_all_gather_ops: Accepted for compatibility; see ``flatten_parameters``.
        auto_wrap_policy: Which modules inside are wrapped too; see `torch_xla.distributed.fsdp.wrap`.
        auto_wrapper_callable: What wraps them; this class by default.
        param_init_fn: Called with a module on device meta to fill it; by default its ``reset_parameters`` is.

    The options whose names start with an underscore are for debugging and have no effect, but ``_shard_size_multiple``:
    the number of elements of a shard is a multiple of it.

    Raises:
        ValueError: A type or the groups make no sense.
        RuntimeError: The module is wrapped already, or cannot be called.
    """

    _inside = "_fsdp_wrapped_module"

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: list[list[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: int | None = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        _shard_size_multiple: int = 128,
        _use_xla_patched_linear: bool = True,
        _debug_dummy_forward_pass: bool = False,
        _debug_msg: str = "xla_fsdp",
        _debug_print: bool = False,
        _debug_dummy_all_gather_op: bool = False,
        _debug_dummy_all_reduce_op: bool = False,
        _debug_dummy_reduce_scatter_op: bool = False,
        _debug_dummy_optimization_barrier_op: bool = False,
    ) -> None:
        options = dict(locals())
        for name in ("self", "module", "auto_wrap_policy", "auto_wrapper_callable", "__class__"):
            options.pop(name, None)
        require_forward(module, XlaFullyShardedDataParallel)
        for name, dtype in (("compute_dtype", compute_dtype), ("buffer_dtype", buffer_dtype)):
            if dtype is not None and dtype not in FLOAT_DTYPES:
                raise ValueError(message("fsdp", f"{name}={dtype}", expected=f"one of {FLOAT_DTYPES}"))
        if sharding_groups is not None and (sharding_rank is None or sharding_world_size is None):
            raise ValueError(
                message("fsdp", "sharding_groups alone", expected="sharding_rank and sharding_world_size too")
            )
        groups = check_groups("fsdp", sharding_groups)
        group = own_group(groups)
        place, size = group.index(runtime.global_ordinal()), len(group)
        if sharding_rank not in (None, place) or sharding_world_size not in (None, size):
            got = f"sharding_rank={sharding_rank}, sharding_world_size={sharding_world_size}"
            raise ValueError(message("fsdp", got, expected=f"{place} and {size}, as this process is in {group}"))
        super().__init__()
        if auto_wrap_policy is not None:
            wrap.wrap_inside(module, auto_wrap_policy, auto_wrapper_callable, XlaFullyShardedDataParallel, options)
        self.rank, self.world_size = place, size
        self.sharding_groups = groups
        self.compute_dtype = compute_dtype or torch.float32
        self.buffer_dtype = buffer_dtype or self.compute_dtype
        self.xla_device = torch_xla.device()
        self.reshard_after_forward = reshard_after_forward
        self._keeps_at_root = disable_reshard_on_root
        self._waits_for_input = optimization_barrier_in_forward
        self._syncs = sync_on_finalization
        self._shards: list[_shards.Shard] = []
        self._is_root: bool | None = None
        _materialize(module, param_init_fn, self.xla_device)
        self._fsdp_wrapped_module = XlaFlattenParamsWrapper(module)
        if size > 1:
            layout = _shards.Layout(
                groups,
                place,
                size,
                shard_param_on_dim_0,
                _shard_size_multiple,
                self.compute_dtype,
                torch.float32 if fp32_reduce_scatter else None,
            )
            self._split(layout, flatten_parameters)
        if any(tensor.device != self.xla_device for tensor in (*module.parameters(), *module.buffers())):
            module.to(self.xla_device)
        for param in self.parameters():
            param._is_sharded = True  # type: ignore[attr-defined]  # by which Lightning knows them in an optimizer
        self._cast_buffers(module)
        if size == 1 and self.compute_dtype != torch.float32:
            _cast_parameters_inside(module, self.compute_dtype)
        if execute_sharding_on_init and self._shards:
            xm.unlazy([shard.param for shard in self._shards])

    def _split(self, layout: _shards.Layout, flatten: bool) -> None:
        names = {owner: name for name, owner in self._fsdp_wrapped_module.module.named_modules()}
        owners = [
            (f"_fsdp_wrapped_module.{names[owner]}".rstrip("."), owner)
            for owner in _outside_wrappers(self._fsdp_wrapped_module.module)
        ]
        flat_name = "_fsdp_wrapped_module.flat_param_" if flatten else None
        self._shards = _shards.make_shards(_shards.parameters_of(owners), layout, self.xla_device, flat_name)
        for shard in self._shards:
            self.register_parameter(shard.registered_name, shard.param)

    def _find_root(self) -> None:
        """The first wrapper that is called has all others inside it."""
        wrappers = [module for module in self.modules() if isinstance(module, XlaFullyShardedDataParallel)]
        shards = [shard for wrapper in wrappers for shard in wrapper._shards]
        ending = _shards.Ending(shards, self._syncs)
        for wrapper in wrappers:
            wrapper._is_root = wrapper is self
        for shard in shards:
            shard.ending = ending

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """This process's parts of the parameters that no wrapper inside has."""
        return [shard.param for shard in self._shards]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if self.compute_dtype != torch.float32:
            args, kwargs = pytree.tree_map(self._cast, (args, kwargs))
        if self._is_root is None and self.world_size > 1:
            self._find_root()
        if not self._shards:
            return self.module(*args, **kwargs)
        inputs = (
            value.detach()
            for value in pytree.tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor) and value.device.type == "xla"
        )
        drops = self.reshard_after_forward and not (self._is_root and self._keeps_at_root)
        with _shards.in_use(self._shards, next(inputs, None) if self._waits_for_input else None, drops):
            return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if floating else value

    def _cast_buffers(self, module: nn.Module) -> None:
        """Casts the buffers that no wrapper inside has cast."""
        for owner in _outside_wrappers(module):
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer.dtype != self.buffer_dtype:
                    cast_buffer = buffer.to(self.buffer_dtype)
                    cast_buffer._orig_dtype = buffer.dtype  # type: ignore[attr-defined]
                    setattr(owner, name, cast_buffer)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: list[list[int]] | None = None
    ) -> torch.Tensor:
        """Bounds the norm of all gradients together; returns what it was.

        Args:
            max_norm: The bound.
            norm_type: Which norm.
            groups: Lists of ordinals whose gradients count; those that share parameters by default.
        """
        gradients = [param.grad for param in self.params_with_grad if param.grad is not None]
        if self.world_size == 1:
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

        def reduce(kind: str, value: torch.Tensor) -> Any:
            return xm.all_reduce(kind, value, groups=groups or self.sharding_groups)

        # A process without a gradient takes part as well.
        local_gradients = gradients or [torch.zeros((), device=self.xla_device)]
        norm: torch.Tensor = _shards.total_norm(local_gradients, float(norm_type), reduce)
        if gradients:
            torch.nn.utils.clip_grads_with_norm_(self.params_with_grad, max_norm, norm)
        return norm

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which gradients are not reduced over processes.

        They are added up, whole, and the next backward pass outside of such a block reduces them with its own.
        """
        shards = [
            shard
            for module in self.modules()
            if isinstance(module, XlaFullyShardedDataParallel)
            for shard in module._shards
        ]
        before = [shard.reduces for shard in shards]
        for shard in shards:
            shard.reduces = False
        try:
            yield
        finally:
            for shard, reduces in zip(shards, before, strict=True):
                shard.reduces = reduces

    def get_shard_metadata(self) -> dict[str, Any]:
        """The metadata that `torch_xla.distributed.fsdp.consolidate_sharded_state_dicts` needs beside the state."""
        buffer_dtypes = {name: getattr(buffer, "_orig_dtype", None) for name, buffer in self.named_buffers()}
        shard_info: dict[str, dict[str, Any]] = {}
        flatten_info: dict[str, Any] = {}
        for name, module in self.named_modules():
            for shard in module._shards if isinstance(module, XlaFullyShardedDataParallel) else ():
                prefix = name.replace(INSIDE, "")
                shard_info.setdefault(prefix, {})[shard.registered_name] = {
                    "_orig_name": shard.name,
                    "_orig_size": shard.shape,
                }
                if shard.flat:
                    full = f"{prefix}.{shard.name}" if prefix else shard.name
                    inside = [piece.name.removeprefix("_fsdp_wrapped_module.") for piece in shard.pieces]
                    shapes = [piece.shape for piece in shard.pieces]
                    flatten_info[full] = (inside, shapes, [shape.numel() for shape in shapes])
        buffers = {
            name.replace(INSIDE, ""): {"_orig_dtype": dtype}
            for name, dtype in buffer_dtypes.items()
            if dtype is not None
        }
        return {
            "shard_info": shard_info,
            "flatten_info": flatten_info,
            "buffer_info": buffers,
            "world_size": self.world_size,
            "rank": self.rank,
        }


def _materialize(module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device) -> None:
    if not any(param.is_meta for param in module.parameters()):
        return
    if param_init_fn is not None:
        param_init_fn(module)
        return
    module.to_empty(device=device)
    with torch.no_grad():
        module.reset_parameters()  # type: ignore[operator]


def _outside_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those inside it that no wrapper inside it has."""
    yield module
    for child in module.children():
        if not isinstance(child, XlaFullyShardedDataParallel):
            yield from _outside_wrappers(child)


@contextlib.contextmanager
def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Puts casts in the place of the parameters that no wrapper inside has."""
    places = [
        (owner._parameters, name, param)
        for owner in _outside_wrappers(module)
        for name, param in owner._parameters.items()
        if param is not None and param.is_floating_point()
    ]
    casts = {id(param): param.to(dtype) for _, _, param in places}
    try:
        for parameters, name, param in places:
            parameters[name] = casts[id(param)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, param in places:
            parameters[name] = param


def _forward_with_casts(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _cast_parameters(module, module._fsdp_compute_dtype):  # type: ignore[arg-type]
        return module._fsdp_forward(*args, **kwargs)  # type: ignore[operator]


def _cast_parameters_inside(module: nn.Module, dtype: torch.dtype) -> None:
    """Makes a module's forward pass use casts, also when checkpointing runs it again."""
    name = INNER_FORWARD if hasattr(module, INNER_FORWARD) else "forward"
    module._fsdp_compute_dtype, module._fsdp_forward = dtype, getattr(module, name)  # type: ignore[assignment]
    setattr(module, name, MethodType(_forward_with_casts, module))
