"""An optimizer whose state is split over processes; one process keeps all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_xla import _bindings, runtime
from torch_xla._errors import message
from torch_xla.core import xla_model as xm
from torch_xla.core._collectives import check_groups, own_group

Group = dict[str, Any]


class ZeroRedundancyOptimizer(Optimizer):
    """Another optimizer on this process's rows of the parameters, in a dtype of its own.

    A step averages the gradients over the processes, bounds their norm, changes the rows and gathers the parameters. A
    process alone has all rows, and does not copy parameters of this dtype.

    Args:
        params: Parameters, or groups of them, on an XLA device.
        optimizer_class: Class of the other optimizer, which is `base_optimizer`.
        optimizer_dtype: Dtype of the copies, float32 by default.
        grad_clipping: Whether the norm is bounded; `grad_norm` is what it was.
        max_norm: The bound, 1.0 by default.
        pin_layout: Accepted for compatibility.
        sharding_groups: Lists of ordinals that split a state among themselves; one of all by default.
        grad_norm_groups: Lists of ordinals of different parts of a model, over which the norm is computed too.
        lazy_init: Whether `init_zero` is called later.
        bucket_cap_mb_all_gather: Accepted for compatibility.
        bucket_cap_mb_reduce_scatter: Accepted for compatibility.
        use_grad_acc_hook: Whether gradients are added up in `optimizer_dtype`, as `main_grad` of the parameters, in
            place of their `grad`.
        save_master_weights: Whether `state_dict` has the copies.
        higher_cc_precision: Accepted for compatibility.
        **defaults: Options of the other optimizer.

    Raises:
        ValueError: The parameters are not all on one XLA device, or the groups are no partition of the processes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: list[list[int]] | None = None,
        grad_norm_groups: list[list[int]] | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: Any,
    ) -> None:
        self.sharding_groups = check_groups("zero", sharding_groups)
        self.grad_norm_groups = check_groups("zero", grad_norm_groups) if grad_norm_groups else None
        members = own_group(self.sharding_groups)
        self.local_rank, self.local_world_size = members.index(runtime.global_ordinal()), len(members)
        super().__init__(params, defaults)
        self.optimizer_class = optimizer_class
        self.optimizer_dtype = optimizer_dtype or torch.float32
        self.grad_clipping = grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        self.use_grad_acc_hook = use_grad_acc_hook
        self.save_master_weights = save_master_weights
        self._grad_norm: torch.Tensor | None = None
        self._bucket_mb = bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter
        self._hooks: list[Any] = []
        self.base_optimizer: Optimizer | None = None
        if not lazy_init:
            self.init_zero()

    @property
    def inited(self) -> bool:
        """Whether `init_zero` was called."""
        return self.base_optimizer is not None

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the gradients of the last step before it was bounded."""
        return self._grad_norm

    def init_zero(self) -> None:
        """Makes the other optimizer, from the values that the parameters have now."""
        self.remove_hooks()
        devices = {param.device for group in self.param_groups for param in group["params"]}
        if len(devices) != 1 or next(iter(devices)).type != "xla":
            got = f"got parameters on {sorted(map(str, devices))}"
            raise ValueError(message("zero", got, expected="one XLA device", do="move the model first"))
        groups = [{**group, "params": [self._copy(p) for p in group["params"]]} for group in self.param_groups]
        self.base_optimizer = self.optimizer_class(groups, **self.defaults)
        _copy_options(self.param_groups, self.base_optimizer.param_groups)

    def _copy(self, param: torch.Tensor) -> nn.Parameter:
        rows = self._rows(param.detach()).to(self.optimizer_dtype)
        shard = nn.Parameter(rows, requires_grad=param.requires_grad)
        if self.use_grad_acc_hook and param.requires_grad:
            self._hooks.append(param.register_post_accumulate_grad_hook(self._add_up))
        return shard

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with as many rows as all processes can have equally many of."""
        missing = -tensor.size(0) % self.local_world_size
        return nn.functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this process."""
        if self.local_world_size == 1:
            return tensor
        return self._padded(_with_rows(tensor)).chunk(self.local_world_size)[self.local_rank].clone()

    @torch.no_grad()
    def _add_up(self, param: torch.Tensor) -> None:
        if param.grad is None:
            return
        if getattr(param, "main_grad", None) is None:
            param.main_grad = torch.zeros_like(param, dtype=self.optimizer_dtype)  # type: ignore[attr-defined]
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None

    def remove_hooks(self) -> None:
        """Lets gradients be added up as they are again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and their copies."""
        if self.base_optimizer is None:
            raise RuntimeError(message("zero", "nothing was initialized", expected="init_zero() before"))
        for mine, other in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            yield from zip(mine["params"], other["params"], strict=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step of the other optimizer.

        Args:
            closure: Computes the gradients again and returns the loss, which is returned.
            **kwargs: For the step of the other optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated, grads = [], []
        for param, shard in self._pairs():
            grad = getattr(param, "main_grad", None) if self.use_grad_acc_hook else param.grad
            if grad is not None:
                updated.append((param, shard))
                grads.append(grad.detach().to(self.optimizer_dtype))
        for (_, shard), grad in zip(updated, self._averaged(grads), strict=True):
            shard.grad = grad
        assert self.base_optimizer is not None
        _copy_options(self.param_groups, self.base_optimizer.param_groups)
        if self.grad_clipping:
            self._clip([shard for _, shard in updated])
        self.base_optimizer.step(**kwargs)
        self.base_optimizer.zero_grad(set_to_none=True)
        self._write_back(updated)
        _copy_options(self.base_optimizer.param_groups, self.param_groups)
        return loss

    def _averaged(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """This process's rows of the averages over the processes."""
        count = self.local_world_size
        if count == 1:
            return grads
        padded = [self._padded(_with_rows(grad)) for grad in grads]
        averages = xm.reduce_scatter_bucketized(
            xm.REDUCE_SUM, padded, 1.0 / count, 0, count, self.sharding_groups, bucket_cap_mb=self._bucket_mb[1]
        )
        return list(averages)

    def _write_back(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gives parameters the values of their rows."""
        if self.local_world_size == 1:
            for param, shard in pairs:
                if _bindings.tensor_id(param) != _bindings.tensor_id(shard):  # not one memory
                    param.copy_(shard)
            return
        rows = [shard.detach().to(param.dtype) for param, shard in pairs]
        gathered = xm.all_gather_bucketized(rows, groups=self.sharding_groups, bucket_cap_mb=self._bucket_mb[0])
        for (param, _), full_param in zip(pairs, gathered, strict=True):
            param.copy_(full_param.narrow(0, 0, _with_rows(param).size(0)).view(param.shape))

    def _clip(self, copies: list[torch.Tensor]) -> None:
        grads = [shard.grad for shard in copies if shard.grad is not None]
        self._grad_norm = torch.nn.utils.get_total_norm(grads) if grads else None
        if self.local_world_size > 1 or self.grad_norm_groups:
            # Rows of padding are zero. A process without a gradient takes part as well.
            device = self.param_groups[0]["params"][0].device
            square = self._grad_norm.square() if self._grad_norm is not None else torch.zeros((), device=device)
            for groups in (self.sharding_groups, self.grad_norm_groups):
                if groups:
                    parts = [square]
                    xm.all_reduce(xm.REDUCE_SUM, parts, groups=groups)
            self._grad_norm = square.sqrt()
        if self._grad_norm is not None:
            factor = (self.max_norm / (self._grad_norm + 1e-6)).clamp(max=1.0)
            for shard, grad in zip(copies, grads, strict=True):
                shard.grad = grad * factor  # anew: the parameter's own gradient stays as it is

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zeroes the gradients.

        Args:
            set_to_none: Whether they are taken away instead.
        """
        super().zero_grad(set_to_none=set_to_none)
        for group in self.param_groups if self.use_grad_acc_hook else ():
            for param in group["params"]:
                if getattr(param, "main_grad", None) is not None:
                    param.main_grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The options, the other optimizer's state (``base_state``), the shapes and, if asked for, the copies."""
        copies = [shard.detach() for _, shard in self._pairs()]
        assert self.base_optimizer is not None
        state = super().state_dict()
        state["base_state"] = self.base_optimizer.state_dict()["state"]
        state["shape_info"] = self.get_shape_info()
        if self.save_master_weights:
            state["sharded_master_weights"] = dict(enumerate(copies))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, with the values of the parameters if it has the copies.

        Args:
            state_dict: What it gave.
        """
        state = copy.deepcopy(state_dict)
        base_state = state.pop("base_state")
        copies = state.pop("sharded_master_weights", None)
        super().load_state_dict(state)
        self.init_zero()
        assert self.base_optimizer is not None
        other = self.base_optimizer.state_dict()
        self.base_optimizer.load_state_dict({**other, "state": base_state, "param_groups": state["param_groups"]})
        if copies is not None:
            pairs = list(self._pairs())
            with torch.no_grad():
                for number, (_, shard) in enumerate(pairs):
                    shard.copy_(copies[number])
                self._write_back(pairs)

    def get_shape_info(self) -> dict[int, torch.Size]:
        """The shapes of the parameters by number."""
        return dict(enumerate(param.shape for group in self.param_groups for param in group["params"]))


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has a first dimension."""
    return tensor if tensor.dim() else tensor.view(1)


def _copy_options(source: list[Group], target: list[Group]) -> None:
    """Copies learning rates and the like from groups to groups."""
    for mine, other in zip(source, target, strict=True):
        other.update({name: value for name, value in mine.items() if name != "params"})
