"""A program gives on device xla what it gives on the CPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torch_xla

Test = Callable[..., None]


def numbers(device: str) -> Tensor:
    return torch.arange(1.0, 5.0).to(device)


def nearly(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-4)


def closely(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


def exactly(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach().resolve_conj(), rtol=0, atol=0)


def on_both(compare: Callable[[Tensor, Tensor], None], compiled: bool = False) -> Callable[[Callable[..., Any]], Test]:
    """Makes a test of a program of a device: its tensors on xla and on the CPU are compared.

    Args:
        compare: Takes one of xla, and one of the CPU.
        compiled: Whether a barrier computes them: small values that are only read may be computed on the host.
    """

    def decorate(program: Callable[..., Any]) -> Test:
        @functools.wraps(program)
        def test(*args: Any, **given: Any) -> None:
            results = []
            for device in ("xla", "cpu"):
                torch.manual_seed(0)
                results.append(tree_leaves(program(*args, device=device, **given)))
                if compiled and device == "xla":
                    torch_xla.sync()
            for ours, theirs in zip(*results, strict=True):
                assert ours.device.type == "xla"
                compare(ours, theirs)

        own = inspect.signature(program)
        test.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[p for p in own.parameters.values() if p.name != "device"]
        )
        return test

    return decorate


as_on_cpu = on_both(nearly, compiled=True)


def refused_alike(call: Callable[[str], Any], first_line: bool = False) -> None:
    """A call with a device raises on xla what it raises on the CPU, and the next one works.

    Args:
        call: The call.
        first_line: Whether only the first lines of what is said are compared.
    """
    with pytest.raises(Exception) as theirs:
        call("cpu")
    with pytest.raises(theirs.type) as ours:
        call("xla")
    mine, expected = (str(error.value).split("\n")[0 if first_line else slice(None)] for error in (ours, theirs))
    assert mine == expected
    torch_xla.sync()
    assert (torch.ones(2, device="xla") + 1).tolist() == [2, 2]
