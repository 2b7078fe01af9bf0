"""The module between a wrapper and what it wraps, which torch_xla 2 has too: its state dict leaves it out."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_xla.distributed.fsdp.wrap import Wrapping

INSIDE = "_fpw_module."


class XlaFlattenParamsWrapper(Wrapping):
    """Runs a module.

    Args:
        module: The module.
    """

    _inside = "_fpw_module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fpw_module = module
        self.register_state_dict_post_hook(_leave_out)
        self.register_load_state_dict_pre_hook(_put_back)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        return self._fpw_module(*args, **kwargs)


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old) :]] = state.pop(name)


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    _rename(state, prefix + INSIDE, prefix)


def _put_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _rename(state, prefix, prefix + INSIDE)
