"""Settings of the process that a program depends on: each changes between two uses of operators of every family."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from conftest import Counting
from probes import of_pytorch

import torch_xla
from torch_xla._core.compile import cache, options, settings
from torch_xla.ops import precision

# Each reads the default dtype somewhere: in the recorder, a Meta kernel, a rule, a decomposition or a CPU kernel.
FAMILIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "division": lambda x: x / 8,
    "number": lambda x: x * 1.5 + 0.1,
    "of a boolean": lambda x: (x > 1) * 0.1,
    "complex number": lambda x: x * 0.1j,
    "comparison": lambda x: x + 16777212 > 16777216.5,
    "unary": lambda x: x.sqrt(),
    "binary": lambda x: torch.atan2(x, x + 1),
    "power": lambda x: torch.float_power(x, 0.3) + x**0.3,
    "where": lambda x: torch.where(x > 2, x, 0.1),
    "creation": lambda x: torch.linspace(0, 1, 8, device=x.device) + torch.arange(8.0, device=x.device) / 3,
    "fill": lambda x: torch.full((8,), 0.1, device=x.device) * 3,
    "reduction": lambda x: torch.cumsum(x * 0.1, 0) + torch.logcumsumexp(x * 0.1, 0),
    "decomposition": lambda x: torch.special.entr(x) + torch.nan_to_num(x / 7),
    "product": lambda x: torch.outer(x / 8, x / 8) @ (x / 8),
    "on the host": lambda x: torch.histc(x / 8, 4),
}


def results(device: str) -> dict[str, torch.Tensor]:
    """What each family gives for whole numbers, in one graph for each."""
    actual = {}
    for name, function in FAMILIES.items():
        actual[name] = function(torch.arange(8).to(device))
        torch_xla.sync()
    return {name: value.cpu() for name, value in actual.items()}


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_default_dtype(dtype: torch.dtype) -> None:
    usual = results("cpu")
    check(results("xla"), usual)
    with of_pytorch("default_dtype", dtype):
        expected, result = results("cpu"), results("xla")
    if dtype == torch.float64:
        check(result, expected)
    assert {name: x.dtype for name, x in result.items()} == {name: x.dtype for name, x in expected.items()}
    check(results("xla"), usual)


def test_the_default_dtype_is_that_of_the_call_not_of_the_barrier() -> None:
    x = torch.tensor([16777217, 5])
    expected = [x > 16777216.5]
    with of_pytorch("default_dtype", torch.float64):
        expected += [x > 16777216.5, torch.special.entr(x)]
        later = x.to("xla")
        actual = [later > 16777216.5, torch.special.entr(later)]
    actual.insert(0, later > 16777216.5)
    torch_xla.sync()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "deterministic algorithms": deterministic,
    "precision of products": lambda: of_pytorch("float32_matmul_precision", "medium"),
    "autocast on CPU": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
    "default device xla": lambda: torch.device("xla"),
    "JAX's types of 64 bits": lambda: jax.enable_x64(True),
    "JAX's precision of products": lambda: jax.default_matmul_precision("bfloat16"),
    "JAX's promotion of types": lambda: jax.numpy_dtype_promotion("strict"),
    "JAX's promotion of ranks": lambda: jax.numpy_rank_promotion("raise"),
    "JAX without programs": lambda: jax.disable_jit(True),
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_others_change_no_value(scope: Callable[[], AbstractContextManager[Any]]) -> None:
    expected = results("cpu")
    with scope():
        check(results("xla"), expected)
    check(results("xla"), expected)


@pytest.mark.parametrize("name", ["deterministic algorithms", "precision of products", "JAX without programs"])
def test_what_a_program_depends_on_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_chosen", None)  # it would come before PyTorch's setting
    with of_pytorch("float32_matmul_precision", "highest"):
        before = settings.process_settings()
        with SCOPES[name]():
            assert settings.process_settings() != before
        assert settings.process_settings() == before


def test_each_setting_is_a_program_and_is_kept(compiles: Counting) -> None:
    def run() -> None:
        x = torch.arange(5).to("xla") / 4 + 0.625
        torch_xla.sync()
        del x

    run()
    for expected in (1, 0):
        with of_pytorch("default_dtype", torch.float64), compiles(expected):
            run()
        with compiles(0):
            run()


@pytest.mark.parametrize("then", [torch.float64, torch.float32])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lowering_keeps_the_default_dtype_of_the_call_to_itself(then: torch.dtype) -> None:
    x = torch.arange(8)
    with of_pytorch("default_dtype", then):
        expected = {name: function(x) for name, function in FAMILIES.items()}
        actual = {name: function(x.to("xla")) for name, function in FAMILIES.items()}
    seen: set[torch.dtype] = set()
    done = threading.Event()

    def loader() -> None:
        while not done.is_set():
            seen.add(torch.tensor([1.5]).dtype)

    later = torch.float64 if then == torch.float32 else torch.float32
    with of_pytorch("default_dtype", later):
        thread = threading.Thread(target=loader)
        thread.start()
        try:
            torch_xla.sync()
            values = {name: value.cpu() for name, value in actual.items()}
        finally:
            done.set()
            thread.join()
    assert seen == {later}
    check(values, expected)


CHOSEN = {"xla_llvm_disable_expensive_passes": True}


@pytest.fixture
def reset() -> Iterator[None]:
    yield
    torch_xla.set_custom_compile_options({})


@pytest.mark.usefixtures("reset")
class TestOptions:
    """Those of the user's for the device's compiler."""

    def test_each_set_has_its_own_programs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: Counting, counted: Counting
    ) -> None:
        monkeypatch.setattr(cache, "_folder", tmp_path)
        x = torch.arange(7.0).to("xla")

        def run() -> None:
            y = x * 3 + 1
            torch_xla.sync()
            assert y.tolist() == [i * 3 + 1 for i in range(7)]

        with compiles(3):
            for chosen in ({}, CHOSEN, {"xla_llvm_disable_expensive_passes": False}, CHOSEN, {}):
                torch_xla.set_custom_compile_options(chosen)
                run()
        assert len(list(tmp_path.iterdir())) == 3
        cache.clear()
        with compiles(0), counted("PersistentCacheHit", 2):
            run()
            torch_xla.compile(run, custom_compile_options=CHOSEN)()

    def test_a_region_has_its_own(self, compiles: Counting) -> None:
        x = torch.arange(9.0).to("xla")
        got: list[Any] = []
        torch_xla.sync()
        with compiles(2):
            for chosen in (None, CHOSEN, None, CHOSEN):
                with torch_xla.compile(custom_compile_options=chosen):
                    with torch_xla.compile():
                        got.append(options.custom())
                    y = x.sin()
        assert got == [(), (*CHOSEN.items(),)] * 2 and options.custom() == ()
        torch.testing.assert_close(y.cpu(), x.cpu().sin())

    def test_an_unknown_one_leaves_the_graph_pending(self, compiles: Counting) -> None:
        x = torch.arange(11.0).to("xla")
        torch_xla.sync()
        torch_xla.set_custom_compile_options({"xla_of_nobody": "2"})
        x.add_(1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"\[compile\] got INVALID_ARGUMENT.*xla_of_nobody.*stays pending"):
                torch_xla.sync()
        torch_xla.set_custom_compile_options({})
        with compiles(1):
            torch_xla.sync()
        assert x.tolist() == [i + 1.0 for i in range(11)]

    @pytest.mark.by_default("a graph runs operator by operator where nobody asked for a program")
    def test_they_ask_for_a_program(self, counted: Counting) -> None:
        torch_xla.set_custom_compile_options(CHOSEN)
        x = torch.arange(13.0).to("xla")
        with counted("UncachedCompile", 1):
            (x + 1).tolist()
            y = x.repeat(20).cos() * 2
            torch_xla.sync()
        assert y.shape == (260,)

    def test_what_are_none(self) -> None:
        for wrong in ([("a", 1)], {"a": [1]}, {1: "a"}, None):
            with pytest.raises(TypeError, match=r"\[compile\] got options .*expected a dict of text, numbers and bool"):
                torch_xla.set_custom_compile_options(wrong)
        with pytest.raises(TypeError, match="expected a dict"):
            torch_xla.compile(torch.sin, custom_compile_options={"a": None})
