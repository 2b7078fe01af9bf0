"""The classic API, `xm`."""

import collections
import io
import threading
import time

import pytest
import torch
from probes import python

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.utils as xu
from torch_xla.utils import serialization


@pytest.fixture(autouse=True)
def first_device():
    yield
    torch_xla.device(0)


class TestDevices:
    @pytest.mark.own_client("a plugin need not tell of its memory")
    def test_memory_info(self):
        info = xm.get_memory_info()
        assert set(info) == {"bytes_used", "bytes_limit", "peak_bytes_used", "kb_free", "kb_total"}
        assert 0 < info["bytes_used"] <= info["peak_bytes_used"] <= info["bytes_limit"]
        assert info["kb_total"] == info["bytes_limit"] // 1024 and 0 < info["kb_free"] < info["kb_total"]
        assert xm.get_memory_info("xla:1")["kb_total"] > 0


class TestBarriers:
    @pytest.mark.costs("a process that imports all anew")
    def test_nothing_happens_before_the_first_tensor(self):
        code = (
            "import sys, threading, torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr\n"
            "for _ in range(3): xm.mark_step(); torch_xla.sync()\n"
            "assert xr.device_type() == 'CPU' and torch_xla.device_count() == 4 and xr.world_size() == 1\n"
            "assert torch_xla.device().index == 0 and xm.is_master_ordinal()\n"
            "assert 'jax' not in sys.modules and threading.active_count() == 1\n"
            "assert not torch.xla._initialized\n"
            "torch.ones(1, device='xla').item()\n"
            "assert torch.xla._initialized\n"
        )
        python("-c", code)

    def test_an_idle_barrier_is_cheap(self):
        torch_xla.sync()
        start = time.perf_counter()
        for _ in range(2000):
            xm.mark_step()
        assert (time.perf_counter() - start) / 2000 < 50e-6  # far from the usual 1 µs: this is no benchmark

    def test_sync_computes_every_device(self):
        a = torch.ones(2, device="xla:0") + 1
        b = torch.ones(2, device="xla:1") + 2
        torch_xla.sync(wait=True)
        assert not torch_xla._bindings.has_pending(0) and not torch_xla._bindings.has_pending(1)
        assert a.tolist() == [2, 2] and b.tolist() == [3, 3]

    def test_unlazy_and_wait(self):
        a, b = torch.ones(2, device="xla") + 1, torch.ones(2, device="xla") * 3
        xm.unlazy([a])
        assert torch_xla._bindings.buffer_of(a) is not None and torch_xla._bindings.buffer_of(b) is None
        xm.wait_device_ops()
        xm.wait_device_ops(["xla:0"])
        with pytest.raises(ValueError, match="tensor 1 is on cpu, expected device xla"):
            xm.unlazy([a, torch.ones(1)])

    def test_optimizer_step(self):
        weight = torch.nn.Parameter(torch.ones(2, device="xla"))
        optimizer = torch.optim.SGD([weight], 0.5)
        weight.grad = torch.ones(2, device="xla")
        assert xm.optimizer_step(optimizer, barrier=True) is None
        assert not torch_xla._bindings.has_pending(0)
        assert weight.tolist() == [0.5, 0.5]
        loss = xm.optimizer_step(optimizer, optimizer_args={"closure": lambda: torch.tensor(7.0)})
        assert loss == 7 and weight.tolist() == [0, 0]

    def test_optimizer_step_may_be_replaced(self, monkeypatch):
        monkeypatch.setattr(xm, "optimizer_step", lambda *args, **kwargs: "mine")
        assert torch_xla.core.xla_model.optimizer_step(None) == "mine"

    def test_replaced_sync_is_used(self, monkeypatch):
        calls = []
        monkeypatch.setattr(torch_xla, "sync", lambda *args: calls.append(args))
        xm.mark_step(True)
        xm.optimizer_step(torch.optim.SGD([torch.ones(1)], 0.1), barrier=True)
        assert calls == [(True, True), ()]

    def test_stablehlo(self):
        x = torch.ones(2, 3).to("xla")
        y = torch.tanh(x @ x.T)
        text = xm.get_stablehlo([y])
        assert "stablehlo.tanh" in text and "tensor<2x2xf32>" in text
        assert xm.get_stablehlo_bytecode([y])[:4] == b"ML\xefR"
        assert torch_xla._bindings.buffer_of(y) is None  # still pending

    def test_stablehlo_of_everything_pending(self):
        torch_xla.sync()
        x = torch.ones(2, 3).to("xla")
        y, z = torch.tanh(x), torch.exp(x)
        text = xm.get_stablehlo()
        assert "stablehlo.tanh" in text and "stablehlo.exp" in text
        assert y.shape == z.shape


class TestClosures:
    def test_run_after_the_barrier_in_order(self):
        seen = []
        x = torch.ones(2, device="xla") * 2
        xm.add_step_closure(lambda t: seen.append(t.tolist()), args=(x,))
        xm.add_step_closure(lambda: seen.append("second"))
        assert seen == []
        torch_xla.sync()
        assert seen == [[2, 2], "second"]
        torch_xla.sync()
        assert len(seen) == 2

    def test_one_graph_for_the_step_and_its_closures(self, compiles):
        x = torch.arange(4.0).to("xla")
        y = x * 3
        xm.add_step_closure(lambda a, b: (a.sum().item(), b.tolist()), args=(y, x))
        torch_xla.sync()
        with compiles(1):  # the sum in the closure; y comes from the step
            z = torch.arange(5.0).to("xla") * 3
            xm.add_step_closure(lambda a: a.tolist(), args=(z,))
            torch_xla.sync()

    def test_a_closure_may_add_another(self):
        seen = []
        xm.add_step_closure(lambda: xm.add_step_closure(lambda: seen.append(1)))
        torch_xla.sync()
        assert seen == []
        torch_xla.sync()
        assert seen == [1]

    def test_an_exception_comes_out_of_the_barrier(self):
        def fail():
            raise KeyError("in closure")

        xm.add_step_closure(fail)
        with pytest.raises(KeyError, match="in closure"):
            torch_xla.sync()
        torch_xla.sync()

    def test_asynchronous_ones_do_not_hold_the_loop_up(self):
        go, seen = threading.Event(), []
        x = torch.ones(2, device="xla") * 2

        def report(tensor):
            assert go.wait(10)
            seen.append((tensor.tolist(), threading.current_thread() is threading.main_thread()))

        xm.add_step_closure(report, args=(x,), run_async=True)
        torch_xla.sync()
        assert seen == []
        go.set()
        xm.wait_device_ops()
        assert seen == [([2, 2], False)]

    def test_a_closure_may_wait_for_the_device(self):
        xm.add_step_closure(xm.wait_device_ops, run_async=True)
        torch_xla.sync()
        xm.wait_device_ops()

    def test_asynchronous_order_and_end(self):
        seen = []
        for number in range(20):
            xm.add_step_closure(seen.append, args=(number,), run_async=True)
            torch_xla.sync()
        xm.wait_device_ops()
        assert seen == list(range(20))

    def test_an_asynchronous_failure_is_raised_by_a_later_barrier(self):
        def fail():
            raise KeyError("in closure")

        seen = []
        xm.add_step_closure(fail, run_async=True)
        torch_xla.sync()
        xm.wait_device_ops()
        xm.add_step_closure(seen.append, args=(1,), run_async=True)
        with pytest.raises(RuntimeError, match="asynchronous step closure failed earlier") as caught:
            torch_xla.sync()
        assert isinstance(caught.value.__cause__, KeyError) and seen == []
        xm.add_step_closure(seen.append, args=(2,), run_async=True)
        torch_xla.sync()
        xm.wait_device_ops()
        assert seen == [2]

    def test_the_queue_is_bounded(self, monkeypatch):
        monkeypatch.setenv("XLA_MAX_ASYNC_QUEUE", "2")
        seen = []

        def slow():
            time.sleep(0.05)
            seen.append(1)

        for _ in range(5):
            xm.add_step_closure(slow, run_async=True)
        torch_xla.sync()
        assert len(seen) >= 2
        xm.wait_device_ops()
        assert len(seen) == 5

    def test_accepted_closures_run_before_the_process_ends(self):
        code = (
            "import time, torch, torch_xla, torch_xla.core.xla_model as xm\n"
            "x = torch.ones(2, device='xla') + 1\n"
            "xm.add_step_closure(lambda t: (time.sleep(0.3), print(t.tolist())), args=(x,), run_async=True)\n"
            "torch_xla.sync()\n"
        )
        assert python("-c", code, imported=True).stdout == "[2.0, 2.0]\n"


class TestRandomState:
    def test_the_state_is_one_integer_that_resumes_the_stream(self):
        for seed in (5, 2**63 - 1, -1, 2**64 - 3):
            xm.set_rng_state(seed)
            torch.rand(3, device="xla")
            torch.rand(3, device="xla")
            state = xm.get_rng_state()
            assert torch.tensor(state).item() == state
            expected = torch.rand(3, device="xla").tolist()
            xm.set_rng_state(torch.tensor(state).item())
            assert torch.rand(3, device="xla").tolist() == expected

    def test_torch_manual_seed_governs_every_device(self):
        torch.manual_seed(21)
        first = [torch.rand(2, device=f"xla:{i}").tolist() for i in range(2)]
        torch.manual_seed(21)
        assert [torch.rand(2, device=f"xla:{i}").tolist() for i in range(2)] == first

    def test_fork_rng(self):
        xm.set_rng_state(5)
        expected = torch.rand(3, device="xla").tolist()
        xm.set_rng_state(5)
        with xm.fork_rng():
            torch.rand(3, device="xla")
            xm.set_rng_state(99)
        assert torch.rand(3, device="xla").tolist() == expected
        with xm.fork_rng(enabled=False):
            xm.set_rng_state(1)
        assert xm.get_rng_state() == 1


class TestMovingData:
    def test_save_and_load(self, tmp_path):
        data = {"a": torch.arange(3).to("xla"), "b": [torch.ones(2, device="xla") * 2, "text"], "c": (1, None)}
        xm.save(data, tmp_path / "file.pt")
        loaded = torch.load(tmp_path / "file.pt")
        assert loaded["a"].device.type == "cpu" and loaded["a"].tolist() == [0, 1, 2]
        assert loaded["b"][0].tolist() == [2, 2] and loaded["b"][1] == "text" and loaded["c"] == (1, None)
        assert data["a"].device.type == "xla"

    def test_tied_weights_are_saved_once(self, tmp_path):
        model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 100, bias=False))
        model[1].weight = model[0].weight
        model.to("xla")
        file = io.BytesIO()
        xm.save(model.state_dict(), file)
        assert 40_000 < len(file.getvalue()) < 60_000
        file.seek(0)
        state = torch.load(file)
        assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
        assert isinstance(state, collections.OrderedDict) and state._metadata

    def test_whole_modules_and_optimizers(self, tmp_path):
        model = torch.nn.Linear(2, 2).to("xla")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2, device="xla")).sum().backward()
        optimizer.step()
        xm.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
        loaded = torch.load(tmp_path / "file.pt", weights_only=False)
        assert isinstance(loaded["model"].weight, torch.nn.Parameter) and loaded["model"].weight.device.type == "cpu"
        torch.testing.assert_close(loaded["model"].weight, model.weight.cpu())
        assert loaded["optimizer"]["state"][0]["exp_avg"].device.type == "cpu"
        assert model.weight.device.type == "xla"

    def test_only_the_master_writes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(xm, "is_master_ordinal", lambda local=True: False)
        xm.save({"a": torch.ones(1, device="xla")}, tmp_path / "none.pt")
        assert not (tmp_path / "none.pt").exists()
        xm.save({"a": torch.ones(1, device="xla")}, tmp_path / "each.pt", master_only=False)
        assert (tmp_path / "each.pt").exists()

    def test_a_second_device_is_saved_too(self, tmp_path):
        torch_xla.device(1)
        xm.save(torch.ones(2, device="xla"), tmp_path / "file.pt")
        assert torch.load(tmp_path / "file.pt").tolist() == [1, 1]

    def test_folder_of_tensors(self, tmp_path):
        path = str(tmp_path / "big")
        data = {"a": torch.arange(3).to("xla"), "b": [torch.ones(2, device="xla")], "c": 5}
        for _ in range(2):
            serialization.save(data, path)
        loaded = serialization.load(path)
        assert loaded["a"].tolist() == [0, 1, 2] and loaded["b"][0].tolist() == [1, 1] and loaded["c"] == 5
        assert len(list((tmp_path / "big.tensors").iterdir())) == 2


class TestOneProcess:
    def test_gradients(self):
        weight = torch.nn.Parameter(torch.ones(2, device="xla"))
        unused = torch.nn.Parameter(torch.ones(2, device="xla"))
        optimizer = torch.optim.SGD([weight, unused], 0.5)
        weight.grad = torch.ones(2, device="xla")
        (grad,) = xm._fetch_gradients(optimizer)
        assert grad.tolist() == [1, 1]
        xm.reduce_gradients(optimizer)
        xm.all_reduce_bucketized_gradients([grad], 0.5, None, True, 1)
        assert weight.grad.tolist() == [0.5, 0.5]
        xm.broadcast_master_param(torch.nn.Linear(2, 2).to("xla"))

    def test_rate_tracker(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        tracker = xm.RateTracker(smooth_factor=0.5)
        tracker.add(10)
        now[0] += 2
        assert tracker.rate() == 5
        tracker.add(30)
        now[0] += 2
        assert tracker.rate() == 10  # half of 15, half of 5
        assert tracker.global_rate() == 10


class TestUtilities:
    def test_instances(self):
        shared = [1, 2]
        data = {"a": shared, "b": (shared, {3}), "c": "x"}
        seen = []
        xu.for_each_instance(data, lambda v: isinstance(v, int), seen.append)
        assert sorted(seen) == [1, 2, 3]
        new = xu.for_each_instance_rewrite(data, lambda v: isinstance(v, int), lambda v: v * 10)
        assert new == {"a": [10, 20], "b": ([10, 20], {30}), "c": "x"} and new["a"] is new["b"][0]
        loop = [1]
        loop.append(loop)
        new = xu.for_each_instance_rewrite(loop, lambda v: isinstance(v, int), lambda v: v * 10)
        assert new[0] == 10 and new[1] is new

    def test_objects_that_cannot_be_copied_are_left_alone(self):
        class Holder:
            def __init__(self, **kwargs):
                self.__dict__.update(kwargs)

            def __copy__(self):
                assert self.copyable
                return Holder(**self.__dict__)

        locked = Holder(copyable=False, lock=threading.Lock())
        data = [locked, Holder(copyable=True, number=1)]
        new = xu.for_each_instance_rewrite(data, lambda v: v == 1 and v is not True, lambda v: 2)
        assert new[0] is locked and new[1].number == 2 and data[1].number == 1
