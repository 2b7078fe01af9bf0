"""What goes wrong is told once, where it belongs; what does not depend on it goes on, and no interrupt is swallowed."""

from __future__ import annotations

import collections
import ctypes
import gc
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import pytest
import torch
from probes import failed, python

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache, compiler
from torch_xla._core.device import transfer
from torch_xla._core.execute import barrier, executor, hooks, plan
from torch_xla._core.graph import graph
from torch_xla._core.lower import lowering
from torch_xla.core import xla_model as xm
from torch_xla.ops import dtypes, registry

LIBRARY = torch.library.Library("failing", "DEF")
LIBRARY.define("probe(Tensor x) -> Tensor")
LIBRARY.define("both(Tensor x) -> (Tensor, Tensor)")
LIBRARY.define("called(Tensor x) -> Tensor")
LIBRARY.define("unknown(Tensor x) -> Tensor")
LIBRARY.impl("probe", lambda x: torch.empty_like(x), "Meta")
LIBRARY.impl("both", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
LIBRARY.impl("called", lambda x: torch.empty_like(x), "Meta")


class Exit(BaseException):
    """As an interrupt: no error."""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rule was traced and no graph compiled; two operators cannot be lowered."""

    def broken(ctx: Any, x: Any) -> Any:
        raise KeyError("no such thing")

    for name in ("probe", "both"):
        monkeypatch.setitem(registry._RULES, f"failing.{name}.default", broken)
    torch_xla.sync(wait=True)
    lowering._rules.clear()
    cache.clear()
    yield
    torch_xla.sync()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is freed by looking for cycles."""
    gc.disable()
    yield
    gc.enable()


def known_to_libraries(error: BaseException) -> bool:
    """As accelerate's `should_reduce_batch_size` tells."""
    return isinstance(error, RuntimeError) and len(error.args) == 1 and " out of memory." in error.args[0]


def fine() -> None:
    """A barrier has nothing left to say."""
    kept = torch.ones(3, device="xla") + 1
    torch_xla.sync(wait=True)
    assert kept.tolist() == [2, 2, 2]


class TestAnOperatorThatCannotBeLowered:
    def test_a_question_before_does_not_change_what_is_given_back(self) -> None:
        x = torch.ones(3, device="xla") + 1
        torch_xla.sync()
        x.add_(1)
        assert plan.has_run_before(_bindings.Cut.of_device(0)) is False
        x.add_(torch.ops.failing.probe(x))
        with pytest.raises(RuntimeError, match="lower failing.probe"):
            (x + 3).sum().item()
        assert x.tolist() == [2, 2, 2]

    def test_only_what_depends_on_it_is_lost(self) -> None:
        x = torch.arange(3.0).to("xla")
        torch_xla.sync()
        shared = x * 2.5
        lost = torch.ops.failing.probe(shared)
        after = lost + 1
        x.add_(lost)
        beside = shared + 1
        alone = torch.ones(3, device="xla") - 3
        with pytest.raises(RuntimeError, match=r"^\[sync\] graph \w+ failed: \[lower failing.probe.default\] KeyError"):
            torch_xla.sync()
        assert not _bindings.has_pending(0)  # the rest has run at this barrier
        assert shared.tolist() == [0, 2.5, 5] and beside.tolist() == [1, 3.5, 6] and alone.tolist() == [-2, -2, -2]
        assert x.tolist() == [0, 1, 2]
        for tensor in (lost, after):
            with pytest.raises(RuntimeError, match="no value before that graph; make it again"):
                tensor.cpu()
        fine()

    def test_as_often_as_it_is_there(self) -> None:
        x = torch.ones(3).to("xla")
        lost = [torch.ops.failing.probe(x + i) for i in range(5)]
        other = torch.ops.failing.both(x)
        kept = x + 7
        with pytest.raises(RuntimeError, match=r"lower failing.probe") as failure:
            torch_xla.sync()
        assert len(failure.value.__notes__) == 1 and "lower failing.both" in failure.value.__notes__[0]
        assert all(_bindings.is_lost(t) for t in (*lost, *other))
        assert kept.tolist() == [8, 8, 8]
        fine()

    def test_a_read_tells_it_and_what_came_later_goes_with_it(self) -> None:
        x = torch.ones(300, 300).to("xla")
        lost = torch.ops.failing.probe(x)
        later = lost * 2
        with pytest.raises(RuntimeError, match="lower failing.probe"):
            lost.cpu()
        torch_xla.sync()
        with pytest.raises(RuntimeError, match="make it again"):
            later.cpu()

    def test_through_a_view(self) -> None:
        x = torch.ones(2, 3).to("xla")
        lost = torch.ops.failing.probe(x)
        row = lost[0]
        row.add_(1)
        with pytest.raises(RuntimeError, match="lower failing.probe"):
            torch_xla.sync()
        with pytest.raises(RuntimeError, match="make it again"):
            row.cpu()

    def test_other_devices_run(self) -> None:
        kept = torch.ones(3).to("xla:1") + 1
        lost = torch.ops.failing.probe(torch.ones(3).to("xla:0"))
        with pytest.raises(RuntimeError, match="lower failing.probe"):
            torch_xla.sync()
        assert not _bindings.has_pending(1) and kept.tolist() == [2, 2, 2]
        assert _bindings.is_lost(lost)

    def test_with_random_numbers_and_numbers_that_vary(self) -> None:
        x = torch.ones(4).to("xla")
        for i in range(2):
            torch.manual_seed(3)
            drawn, rolled = torch.rand(4, device="xla"), x.roll(i) * (i + 2.5)
            lost = torch.ops.failing.probe(drawn)
            with pytest.raises(RuntimeError, match="lower failing.probe"):
                torch_xla.sync()
            assert rolled.tolist() == [i + 2.5] * 4 and _bindings.is_lost(lost)
        torch.manual_seed(3)
        assert torch.equal(drawn.cpu(), torch.rand(4, device="xla").cpu())


@pytest.mark.compiled("a program fails, which its operators by themselves do not")
class TestAGraphThatFailsAsAWhole:
    """XLA does not say which operator it objects to: what has nothing to do with it is found by halves."""

    @pytest.fixture
    def refused(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
        """XLA objects to an operator; gives the sizes of the graphs that it was shown."""

        def refuse(op: str, error: str = "INTERNAL: no") -> list[int]:
            shown: list[int] = []
            compile = compiler.compile_lowered

            def refusing(cut: Any, lowered: Any, name: str) -> Any:
                shown.append(cut.num_nodes)
                if any(node.op == op for node in cut.describe_nodes(graph.CLASSES)):
                    raise ValueError(error)
                return compile(cut, lowered, name)

            monkeypatch.setattr(compiler, "compile_lowered", refusing)
            return shown

        return refuse

    def test_what_does_not_need_it_runs(self, refused: Any) -> None:
        shown = refused("aten.tan.default")
        x = torch.ones(3).to("xla")
        parts = [(x + i).sin() for i in range(7)]
        bad = (x + 1).tan().cos()
        with pytest.raises(RuntimeError, match=r"^\[sync\] graph \w+ failed: INTERNAL: no"):
            torch_xla.sync()
        assert not _bindings.has_pending(0)
        for i, part in enumerate(parts):
            torch.testing.assert_close(part.cpu(), torch.full((3,), 1.0 + i).sin())
        assert _bindings.is_lost(bad)
        assert len(shown) == 7  # the whole, and two at each of three levels
        fine()

    def test_halves_that_fit_are_no_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = executor.run

        def small(executable: Any, cut: Any) -> None:
            if cut.num_nodes > 1:
                raise ValueError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes.")
            run(executable, cut)

        monkeypatch.setattr(executor, "run", small)
        monkeypatch.setattr(cache, "run", lambda cut: False)
        x = torch.ones(3).to("xla")
        results = [x + i for i in range(3)]
        torch_xla.sync()
        assert [r.tolist() for r in results] == [[1] * 3, [2] * 3, [3] * 3]

    def test_all_of_one_piece(self, refused: Any) -> None:
        shown = refused(
            "aten.tan.default", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 20971520 bytes."
        )
        x = torch.ones(3).to("xla")
        y = x + 1
        z = y.tan()
        with pytest.raises(torch.OutOfMemoryError) as failure:
            torch_xla.sync()
        assert known_to_libraries(failure.value) and len(shown) == 1
        assert str(failure.value).startswith("XLA out of memory. Tried to allocate 20.00 MiB. [memory] graph ")
        assert _bindings.is_lost(y) and _bindings.is_lost(z)
        fine()


class TestMemory:
    def test_a_run_that_does_not_fit_is_told_once(self) -> None:
        y = torch.randn(10**12, device="xla")
        part = y[:1]
        with pytest.raises(torch.OutOfMemoryError) as failure:
            torch_xla.sync()
            part.cpu()
        assert known_to_libraries(failure.value) and "Tried to allocate 3725.29 GiB." in str(failure.value)
        for _ in range(3):
            fine()
        with pytest.raises(RuntimeError, match="make it again"):
            y + 1
        assert torch.ones(2, device="xla").tolist() == [1, 1]

    def test_not_at_exit_either(self) -> None:
        code = """
import torch, torch_xla
y = torch.randn(10**12, device="xla")
try:
    torch_xla.sync(wait=True)
except torch.OutOfMemoryError:
    print("told")
"""
        child = python("-c", code, imported=True)
        assert child.stdout == "told\n" and "out of memory" not in child.stderr.lower()

    def test_a_fill_too_large_for_the_host(self) -> None:
        torch_xla.sync()
        large, kept = torch.zeros(10**13, device="xla"), torch.ones(3, device="xla") + 1
        needs = large[:2] + 1
        filled = torch.full((2,), 3.0, device="xla")
        with pytest.raises(torch.OutOfMemoryError) as failure:
            torch_xla.sync()
        text = str(failure.value)
        assert known_to_libraries(failure.value) and text.startswith(
            "XLA out of memory. Tried to allocate 37252.90 GiB."
        )
        assert "float32[10000000000000] on their way to xla:0, made at " + __file__ in text
        assert not _bindings.has_pending(0) and kept.tolist() == [2, 2, 2] and filled.tolist() == [3, 3]
        assert _bindings.is_lost(large) and _bindings.is_lost(needs)
        fine()

    def test_an_upload_too_large_for_the_host(self) -> None:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"^XLA out of memory\. Tried to allocate 37252.90 GiB"
        ) as failure:
            torch.zeros(1).expand(10**13).to("xla")
        assert known_to_libraries(failure.value)
        fine()

    def test_more_than_addresses(self) -> None:
        with pytest.raises(torch.OutOfMemoryError) as failure:
            torch.empty(2**46, device="xla")
        assert known_to_libraries(failure.value)

    def test_what_a_failed_run_made_has_no_value(self) -> None:
        x = torch.ones(3).to("xla")
        kept, lost = x + 1, x + 2
        torch_xla.sync(wait=True)
        held = _bindings.tensor_of(
            failed("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes."), [3], torch.float32, 0
        )
        pending = held * 2
        other = kept * 2
        _bindings.in_flight(0).add_program(failed("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes."))
        _bindings.in_flight(0).add_program(failed("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes."))
        _bindings.in_flight(0).add_program(failed("INTERNAL: another"))
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 512 bytes") as failure:
            torch_xla.sync()
        assert failure.value.__notes__ == ["[run] another that was started failed too: INTERNAL: another"]
        assert other.tolist() == [4, 4, 4] and lost.tolist() == [3, 3, 3]
        for tensor in (held, pending):
            with pytest.raises(RuntimeError, match="comes from that graph, and is lost; make it again"):
                tensor.cpu()
        fine()

    def test_a_fill_without_room_is_told_by_one_barrier(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fill(*_: Any) -> Any:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(transfer, "fill", fill)
        x = torch.zeros(300, 300, device="xla")
        lost, kept = x + 1, torch.arange(2, device="xla") * 3
        for ask in (x.cpu, torch_xla.sync):
            with pytest.raises(torch.OutOfMemoryError):
                ask()
        torch_xla.sync()
        assert kept.tolist() == [0, 3] and _bindings.is_lost(lost)

    @pytest.mark.compiled("it fails where a program is started")
    def test_another_late_failure_takes_no_graph_with_it(self) -> None:
        y = torch.ones(3).to("xla") * 3
        _bindings.in_flight(0).add_program(failed("INTERNAL: what"))
        _bindings.in_flight(0).add_program(failed("INTERNAL: what"))
        with pytest.raises(RuntimeError, match=r"^\[run\] a graph that was started failed, on xla:0: INTERNAL: what"):
            torch_xla.sync()
        assert not _bindings.has_pending(0) and y.tolist() == [3, 3, 3]
        fine()


class TestTypesThatXlaLacks:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.mul(torch.ones(2, dtype=torch.float16, device="xla"), 1j),
            lambda: torch.ones(2, device="xla").to(torch.complex32),
            lambda: torch.zeros(2, dtype=torch.complex32, device="xla"),
            lambda: torch.zeros(2, dtype=torch.complex32).to("xla"),
            lambda: torch.ones(2, device="xla").view(torch.complex32),
            lambda: torch.complex(torch.ones(2, device="xla").half(), torch.ones(2, device="xla").half()),
            lambda: torch.empty(2, dtype=torch.float8_e8m0fnu, device="xla"),
            pytest.param(
                lambda: torch.quantize_per_tensor(torch.ones(2, device="xla"), 0.1, 0, torch.qint8),
                marks=pytest.mark.own_client(
                    "an operator of the host gives a tensor on the CPU, as PyTorch has it there"
                ),
            ),
        ],
    )
    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_are_refused_at_the_line(self, make: Callable[[], Any]) -> None:
        kept = torch.ones(2, device="xla") + 1
        for _ in range(2):
            with pytest.raises(TypeError, match=r"^\[dtype\] got torch\.\w+, which has no XLA type"):
                make()
        torch_xla.sync()
        assert kept.tolist() == [2, 2]

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_are_refused_where_python_words_it(self) -> None:
        with pytest.raises(TypeError, match="unsupported operand"):  # which it says of any TypeError of `*`
            torch.ones(2, dtype=torch.float16, device="xla") * 1j

    def test_are_those_that_rules_do_not_know(self) -> None:
        known = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
        assert len(known) > 30
        assert {dtype for dtype in known if _bindings.has_xla_type(dtype)} == set(dtypes._TO_NUMPY)


@pytest.mark.compiled("stages of programs fail")
@pytest.mark.usefixtures("uncollected")
class TestWhatFailedIsFreed:
    """The tensors of a function that catches an error are gone when it returns."""

    @staticmethod
    def gone(make: Callable[[], torch.Tensor], fails: Callable[[torch.Tensor], None], error: type[Exception]) -> None:
        alive = []

        def step() -> str:
            t = make()
            alive.append(weakref.ref(t))
            try:
                fails(t)
            except error as raised:
                return str(raised)
            return ""

        assert step()
        assert alive[0]() is None

    def test_lowering(self) -> None:
        self.gone(lambda: torch.ops.failing.probe(torch.ones(2).to("xla")), lambda t: torch_xla.sync(), RuntimeError)

    def test_reading(self) -> None:
        self.gone(lambda: torch.ops.failing.probe(torch.ones(300, 300).to("xla")), lambda t: t.cpu(), RuntimeError)

    @pytest.mark.parametrize("stage", ["compile", "run", "late"])
    def test_later_stages(self, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise ValueError("INTERNAL: no")

        if stage == "compile":
            monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: fail())
        elif stage == "run":
            monkeypatch.setattr(executor, "run", fail)
        else:
            for _ in range(2):
                _bindings.in_flight(0).add_program(failed("INTERNAL: no"))
        self.gone(lambda: torch.ones(2).to("xla").sin(), lambda t: torch_xla.sync(), RuntimeError)

    def test_fills_and_uploads(self) -> None:
        self.gone(lambda: torch.zeros(10**13, device="xla"), lambda t: torch_xla.sync(), RuntimeError)
        self.gone(lambda: torch.zeros(1).expand(10**13), lambda t: t.to("xla"), RuntimeError)


class TestInterrupts:
    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, MemoryError, Exit])
    @pytest.mark.own_client("an operator of the host needs no fake kernel")
    def test_in_a_fake_kernel(self, interrupt: type[BaseException]) -> None:
        raises = True

        def fake(x: torch.Tensor) -> torch.Tensor:
            if raises:
                raise interrupt("now")
            return torch.empty_like(x)

        with torch.library._scoped_library("failing", "FRAGMENT") as library:
            library.define("faked(Tensor x) -> Tensor")
            library.impl("faked", fake, "Meta")
            library.impl("faked", lambda x: x * 2, "CPU")
            x = torch.ones(2, device="xla")
            with pytest.raises(interrupt, match="now"):
                torch.ops.failing.faked(x)
            raises = False
            assert torch.ops.failing.faked(x).tolist() == [2, 2]

    @pytest.mark.own_client("an operator of the host needs no fake kernel")
    def test_in_the_fake_kernel_of_an_operator_for_cpus(self) -> None:
        @torch.library.custom_op("failing::twice", mutates_args=(), device_types="cpu")
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @twice.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            twice(torch.ones(1, device="xla"))

    def test_what_a_fake_kernel_cannot_tell_is_no_interrupt(self) -> None:
        def fake(x: torch.Tensor) -> torch.Tensor:
            raise ValueError("its shape depends on the values")

        with torch.library._scoped_library("failing", "FRAGMENT") as library:
            library.define("depends(Tensor x) -> Tensor")
            library.impl("depends", fake, "Meta")
            library.impl("depends", lambda x: x[x > 1], "CPU")
            assert torch.ops.failing.depends(torch.arange(4.0).to("xla")).tolist() == [2, 3]

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Exit])
    @pytest.mark.own_client("what has no lowering is not recorded")
    def test_in_a_rule(self, interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
        def rule(ctx: Any, x: Any) -> Any:
            raise interrupt("now")

        y = torch.ops.failing.called(torch.ones(3).to("xla"))
        with monkeypatch.context() as patch:
            patch.setitem(registry._RULES, "failing.called.default", rule)
            with pytest.raises(interrupt, match="now"):
                torch_xla.sync()
        monkeypatch.setitem(registry._RULES, "failing.called.default", lambda ctx, x: x + 1)
        torch_xla.sync()
        assert y.tolist() == [2, 2, 2]

    @pytest.mark.compiled("a program's start is interrupted")
    def test_while_the_rest_of_a_failed_graph_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.ones(3).to("xla")
        lost, kept = torch.ops.failing.probe(x), x + 1

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(executor, "run", stop)
            with pytest.raises(KeyboardInterrupt):
                torch_xla.sync()
        with pytest.raises(RuntimeError, match="lower failing.probe"):  # whoever asks next is told
            torch_xla.sync()
        torch_xla.sync()
        assert kept.tolist() == [2, 2, 2] and _bindings.is_lost(lost)

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Exit])
    @pytest.mark.own_client("an operator of the host raises at its line")
    def test_in_a_host_callback(self, interrupt: type[BaseException]) -> None:
        raises = True

        def kernel(x: torch.Tensor) -> torch.Tensor:
            if raises:
                raise interrupt("now")
            return x * 2

        with torch.library._scoped_library("failing", "FRAGMENT") as library:
            library.define("on_host(Tensor x) -> Tensor")
            library.impl("on_host", lambda x: torch.empty_like(x), "Meta")
            library.impl("on_host", kernel, "CPU")
            y = torch.ops.failing.on_host(torch.ones(2).to("xla"))
            with pytest.raises(interrupt, match="now"):
                torch_xla.sync()
            raises = False
            torch_xla.sync()
            assert y.tolist() == [2, 2]

    def test_in_a_step_closure(self) -> None:
        def closure() -> None:
            raise KeyboardInterrupt

        xm.add_step_closure(closure)
        with pytest.raises(KeyboardInterrupt):
            xm.mark_step()
        xm.mark_step()

    def test_in_the_last_asynchronous_closure(self) -> None:
        code = """
import torch_xla.core.xla_model as xm
xm.add_step_closure(lambda: 1 / 0, run_async=True)
xm.mark_step()
"""
        assert "ZeroDivisionError" in python("-c", code, imported=True).stderr  # no barrier comes that would raise it

    def test_while_an_earlier_run_is_waited_for(self) -> None:
        class Interrupted:
            asked = 0

            def block_until_ready(self) -> None:
                self.asked += 1
                if self.asked == 1:
                    raise KeyboardInterrupt
                raise ValueError("INTERNAL: it failed in the end")

        _bindings.in_flight(0).add_program(Interrupted())
        with pytest.raises(KeyboardInterrupt):
            barrier.wait(0)
        with pytest.raises(RuntimeError, match="it failed in the end"):
            barrier.wait(0)
        barrier.wait(0)


class TestReferences:
    @pytest.mark.compiled("programs take packs")
    def test_of_inputs_where_gathering_them_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        weights = [torch.randn(4, 4).to("xla").requires_grad_() for _ in range(6)]
        large = torch.ones(200, 200).to("xla")
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

        def step() -> None:
            (sum(w.square().sum() for w in weights) + large.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

        buffer = _bindings.buffer_of(large)
        held = sys.getrefcount(buffer)

        def fail(self: Any, *_: Any) -> Any:
            raise RuntimeError("no pack")

        monkeypatch.setattr(hooks.Hooks, "pack", fail)
        with pytest.raises(RuntimeError, match="no pack"):
            step()
            torch_xla.sync()
        gc.collect()
        assert sys.getrefcount(buffer) == held

    def test_that_the_interpreter_has_no_room_to_take(self) -> None:
        """Buffers dropped without the GIL are released by a pending call; the interpreter takes only so many."""

        def bytes_alive() -> int:
            return sum(array.nbytes for array in jax.live_arrays())

        gc.collect()
        torch_xla.sync(wait=True)
        before = bytes_alive()
        nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
        add = partial(ctypes.pythonapi.Py_AddPendingCall, nothing, None)
        tensors = [torch.ones(1000).to("xla")]
        # All in one call, between whose parts the interpreter runs none of those that are pending.
        answers = collections.deque(map(operator.call, [*[add] * 400, tensors.clear]))
        assert -1 in answers and bytes_alive() == before + 4000
        tensors.append(torch.ones(1000).to("xla"))
        tensors.clear()
        assert bytes_alive() == before
