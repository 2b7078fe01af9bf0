"""Dispatch: JAX starts our programs from C++, whatever its own settings are."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import torch_xla
from torch_xla import _bindings, _jax_internals
from torch_xla._core.compile import cache


@pytest.fixture
def x() -> torch.Tensor:
    made = torch.linspace(0, 1, 6).to("xla")
    torch_xla.sync()
    return made


def step(x: torch.Tensor) -> None:
    x.mul_(0.5).add_(0.25)
    torch_xla.sync()


class TestPreparing:
    """JAX asks Python how to start a program only for buffers of a new kind."""

    @staticmethod
    def known(x: torch.Tensor) -> int:
        """How many kinds of buffers the program of a step was prepared for."""
        step(x)
        return cache._executables.values()[-1].program.run._cache_size()

    def test_once(self, x: torch.Tensor) -> None:
        for _ in range(4):
            assert self.known(x) == 1

    def test_again_under_other_settings(self, x: torch.Tensor, compiles) -> None:
        step(x)
        with compiles(0), jax.enable_x64(True):
            assert self.known(x) == 2
        assert self.known(x) == 2
        torch.testing.assert_close(x.cpu(), (torch.linspace(0, 1, 6) - 0.5) / 8 + 0.5)

    def test_in_another_thread(self, x: torch.Tensor, compiles) -> None:
        step(x)
        with compiles(0):
            thread = threading.Thread(target=step, args=(x,))
            thread.start()
            thread.join()
            step(x)
        torch.testing.assert_close(x.cpu(), (torch.linspace(0, 1, 6) - 0.5) / 8 + 0.5)

    def test_for_arrays_of_jax(self, compiles) -> None:
        values: Any = np.linspace(0, 1, 6, dtype=np.float32)
        with compiles(1):
            for place in (None, jax.devices()[0], None):
                given = _bindings.tensor_of(jax.device_put(values, place), [6], torch.float32, 0)
                result = given * 0.375
                torch_xla.sync()
                assert result.cpu().equal(torch.linspace(0, 1, 6) * 0.375)


class TestSettingsOfJax:
    @pytest.mark.parametrize("switch", [jax.disable_jit, jax.debug_nans, jax.debug_infs])
    def test_in_a_scope(self, x: torch.Tensor, switch: Any) -> None:
        with switch(True):
            for _ in range(3):
                step(x)
            nothing = (x - x) / (x - x)
            torch_xla.sync()
        torch.testing.assert_close(x.cpu(), (torch.linspace(0, 1, 6) - 0.5) / 8 + 0.5)
        assert nothing.isnan().all()

    @pytest.mark.parametrize("name", ["jax_disable_jit", "jax_debug_nans", "jax_debug_infs"])
    def test_for_the_whole_process(self, x: torch.Tensor, name: str) -> None:
        jax.config.update(name, True)
        try:
            step(x)
            nothing = (x - x) / (x - x)
            torch_xla.sync()
            assert getattr(jax.config, name)
        finally:
            jax.config.update(name, False)
        torch.testing.assert_close(x.cpu(), (torch.linspace(0, 1, 6) - 0.5) / 2 + 0.5)
        assert nothing.isnan().all()


def test_an_input_that_was_deleted_outside(x: torch.Tensor, compiles: Callable[[int], Any]) -> None:
    kept = torch.ones(6).to("xla")
    torch_xla.sync()
    _bindings.buffer_of(x).delete()
    result = x + kept
    with pytest.raises(RuntimeError, match=r"\[run\] input \d, float32\[6\], is gone: something outside torch_xla"):
        torch_xla.sync()
    with pytest.raises(RuntimeError, match="had no value"):
        result.cpu()
    again = torch.zeros(6).to("xla") + kept
    with compiles(0):
        torch_xla.sync()
    assert again.tolist() == [1] * 6


def test_an_interrupt_while_it_is_prepared(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, compiles: Callable[[int], Any]
) -> None:
    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    x.mul_(0.125)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_jax_internals, "MeshExecutableFastpathData", interrupt)
        torch_xla.sync()
    with compiles(0):
        for _ in range(3):
            torch_xla.sync()
            x.mul_(0.125)
    torch.testing.assert_close(x.cpu(), torch.linspace(0, 1, 6) / 4096)


@pytest.mark.parametrize("name", ["jaxlib._jax.pjit", "jax._src.interpreters.pxla.batched_device_put"])
def test_a_jax_without_what_we_use_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(name)
        with pytest.raises(ImportError, match=rf"\[jax\] got version {jax.__version__} .*{name.rpartition('.')[2]}"):
            importlib.reload(_jax_internals)
    importlib.reload(_jax_internals)
