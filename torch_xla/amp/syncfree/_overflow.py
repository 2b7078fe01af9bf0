"""What an optimizer is told of gradients that overflowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def flag(optimizer: object, found_inf: torch.Tensor | None) -> torch.Tensor | None:
    """1 where the step is to be skipped, else 0, as float32; None where nobody looked.

    Args:
        optimizer: The optimizer; `torch.amp.GradScaler` sets ``found_inf`` and ``grad_scale`` on it.
        found_inf: What the caller of ``step`` found; any number but 0 skips.

    Raises:
        ValueError: It has dimensions.
    """
    overflow = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf
    if overflow is None:
        return None
    if overflow.shape:
        raise ValueError("The found_inf tensor has to be scalar type")
    return (overflow != 0).to(torch.float32)


class Skipping:
    """What the optimizers here have in common; it stands before PyTorch's class among the bases."""

    param_groups: list[dict[str, Any]]

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)  # type: ignore[call-arg]
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, found_inf: torch.Tensor | None = None) -> Any:
        """Updates the parameters, unless the gradients are said not to be finite.

        Args:
            closure: Computes the loss again.
            found_inf: 0-d tensor; the step is skipped where it is not 0. `torch.amp.GradScaler` provides it.

        Returns:
            The closure's loss.

        Raises:
            ValueError: ``found_inf`` has dimensions.
        """
        overflow = flag(self, found_inf)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group, overflow)
        return loss

    def _update(self, group: dict[str, Any], overflow: torch.Tensor | None) -> None:
        """Updates the parameters of a group where `overflow` is not 1."""
        raise NotImplementedError
