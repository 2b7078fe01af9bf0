"""The runtime's answers, `xr`, what other libraries ask about TPUs, and the module `torch.xla`."""

import os
import sys
import warnings

import pytest
import torch
from probes import python, setting

import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla import _config
from torch_xla._internal import tpu

four_cpus = pytest.mark.skipif(xr.device_type() != "CPU" or torch_xla.device_count() != 4, reason="needs four CPUs")


class TestRuntime:
    @four_cpus
    def test_one_process(self):
        assert xr.device_type() == "CPU"
        assert xr.world_size() == xr.process_count() == xr.local_process_count() == 1
        assert xr.global_ordinal() == xr.local_ordinal() == xr.process_index() == xr.host_index() == 0
        assert xr.global_device_count() == xr.local_device_count() == xr.addressable_device_count() == 4
        assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count() == 4
        assert xr.is_bf16_supported() and xr.get_master_ip() == "127.0.0.1"

    @four_cpus
    def test_device_attributes(self):
        assert xr.runtime_device_attributes("xla:1")["name"] == "CPU:1"
        assert [actual["name"] for actual in xr.global_runtime_device_attributes()] == torch_xla.real_devices()
        for name in ("xla:9", "nothing"):
            with pytest.raises(ValueError, match=rf"\[runtime\] got device '{name}'"):
                xr.runtime_device_attributes(name)

    @four_cpus
    def test_spmd_is_refused_beside_tensors_of_other_devices(self):
        kept = torch.ones(1, device="xla:1")
        with pytest.raises(RuntimeError, match=r"\[spmd\] got tensors on (xla:0, )?xla:1 before SPMD mode"):
            xr.use_spmd()
        assert not xr.is_spmd() and kept.is_xla

    @four_cpus
    def test_the_device_type_is_fixed_once_in_use(self):
        torch.ones(1, device="xla").item()
        xr.set_device_type("CPU")
        with pytest.raises(RuntimeError, match="Can't change device type after XLA runtime is initialized"):
            xr.set_device_type("TPU")

    @pytest.mark.costs("a process that imports all anew")
    def test_the_device_type_is_known_without_a_client(self):
        code = (
            "import sys, torch_xla.runtime as xr\n"
            "xr.set_device_type('CPU')\n"
            "import os; os.environ['CPU_NUM_DEVICES'] = '3'\n"
            "print(xr.device_type(), xr.global_device_count(), 'jax' in sys.modules)\n"
        )
        assert python("-c", code, PJRT_DEVICE="TPU").stdout == "CPU 3 False\n"
        code = "import torch_xla; print(torch_xla.runtime.device_type())"
        assert python("-c", code, imported=True, PJRT_DEVICE="TPU").stdout == "TPU\n"

    def test_an_unknown_device_type_lists_the_known_ones(self):
        code = "import torch, torch_xla; torch.ones(1, device='xla').item()"
        result = python("-c", code, check=False, imported=True, PJRT_DEVICE="banana")
        assert result.returncode and "banana" in result.stderr and "available here: CPU" in result.stderr

    @pytest.mark.compiled("it is about kept programs")
    def test_compiled_graphs_are_kept_between_runs(self, tmp_path):
        code = (
            "import torch, torch_xla, torch_xla.runtime as xr, torch_xla.debug.metrics as met\n"
            f"xr.initialize_cache({str(tmp_path / 'cache')!r})\n"
            "y = torch.arange(4.0).to('xla').sin() * 2\n"
            "torch_xla.sync()\n"
            "print(y.cpu().sum().item() > 0, xr.get_num_cached_compilation_graph() > 0)\n"
            "print(met.counter_value('UncachedCompile') or 0)\n"
        )
        first, second = (python("-c", code, imported=True) for _ in range(2))
        assert first.stdout.startswith("True True\n") and int(first.stdout.split()[2]) >= 1, first.stderr
        assert second.stdout == "True True\n0\n", second.stderr


class TestTpuQuestions:
    """Lightning takes a positive number of devices as "use XLA"."""

    @four_cpus
    def test_only_an_explicit_choice_makes_devices_available(self, monkeypatch):
        monkeypatch.setattr(tpu, "num_available_chips", lambda: 0)
        assert tpu.num_available_devices() == 4  # the tests set PJRT_DEVICE=CPU
        for value in (None, "TPU"):
            with setting(_config.PJRT_DEVICE, value):
                assert tpu.num_available_devices() == 0

    def test_a_tpu_machine(self, monkeypatch):
        monkeypatch.setattr(tpu, "num_available_chips", lambda: 4)
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        monkeypatch.setenv("CLOUD_TPU_TASK_ID", "1")
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
        monkeypatch.setenv("TPU_PROCESS_BOUNDS", "2,1,1")
        assert tpu.version() == 5 and tpu.get_tpu_type() == "v5litepod"
        assert tpu.num_logical_cores_per_chip() == 1 and tpu.num_available_devices() == 4
        assert tpu.worker_id() == tpu.task_id() == 1
        assert tpu.get_worker_ips() == ["a", "b"] and tpu.num_expected_global_devices() == 8
        assert tpu.num_local_processes() == tpu.process_bounds_size() == 2
        assert tpu.discover_master_worker_ip() == "a"
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-8")
        assert tpu.num_available_devices() == 8
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "strange")
        with pytest.raises(OSError, match="accelerator type 'strange'"):
            tpu.version()

    def test_metadata_of_the_machine(self, monkeypatch):
        monkeypatch.setattr(tpu, "_metadata", lambda key: "ACCELERATOR_TYPE: 'v4-8'\nWORKER_ID: '2'\n")
        assert tpu.get_tpu_env() == {"ACCELERATOR_TYPE": "v4-8", "WORKER_ID": "2"} and tpu.version() == 4

    def test_other_machines(self, monkeypatch):
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)  # JAX sets it where it finds no TPU
        with pytest.raises(OSError, match="no TPU metadata"):
            tpu.get_tpu_env()
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        with pytest.raises(OSError, match="TPU_SKIP_MDS_QUERY forbids"):
            tpu.get_worker_ips()
        assert tpu.process_bounds_size() is None and tpu.task_id() is None


class TestDeviceModule:
    @four_cpus
    def test_registration(self):
        assert torch.get_device_module("xla") is torch.xla is sys.modules["torch.xla"]
        assert torch.xla.is_available() and torch.xla.device_count() == 4
        assert torch.xla.get_device_name(1) == "CPU:1"
        assert not hasattr(torch.xla, "banana")

    def test_current_device(self):
        with torch.xla.device(2):
            assert torch.xla.current_device() == 2 and torch_xla.device().index == 2
            with torch.xla.device_of(torch.ones(1, device="xla:1")):
                assert torch.xla.current_device() == 1
            with torch.xla.device_of(torch.ones(1)), torch.xla.device(None):
                assert torch.xla.current_device() == 2
        assert torch.xla.current_device() == 0
        torch.xla.set_device("xla:1")
        assert torch.xla.current_device() == 1
        torch.xla.set_device(0)

    def test_random_state(self):
        torch.xla.manual_seed(3)
        torch.rand(2, device="xla")
        state = torch.xla.get_rng_state()
        assert state.dtype == torch.uint8 and state.shape == (16,)
        first = torch.rand(2, device="xla").tolist()
        torch.xla.set_rng_state(state)
        assert torch.rand(2, device="xla").tolist() == first
        torch.xla.manual_seed_all(2**64 - 1)
        assert torch.xla.initial_seed() == 2**64 - 1
        states = torch.xla.get_rng_state_all()
        torch.xla.seed_all()
        assert torch.xla.initial_seed() != 2**64 - 1
        torch.xla.set_rng_state_all(states)
        assert torch.equal(torch.xla.get_rng_state(f"xla:{len(states) - 1}"), states[-1])
        torch.xla.seed()
        with pytest.raises(ValueError, match="got a state of 3 bytes"):
            torch.xla.set_rng_state(torch.zeros(3, dtype=torch.uint8))

    def test_checkpointing_draws_the_same_numbers_again(self):
        from torch.utils.checkpoint import checkpoint

        torch.ones(1, device="xla").item()
        assert torch.xla._initialized
        x = torch.ones(64, device="xla", requires_grad=True)
        y = checkpoint(lambda t: torch.nn.functional.dropout(t * 2, 0.5), x, use_reentrant=False)
        y.sum().backward()
        torch.testing.assert_close(x.grad.cpu(), y.detach().cpu())

    def test_synchronize_streams_and_events(self):
        x = torch.ones(2, device="xla") + 1
        torch.xla.synchronize()
        assert torch_xla._bindings.buffer_of(x) is not None
        stream = torch.xla.current_stream()
        assert stream == torch.xla.default_stream() == torch.xla.Stream("xla:0") and len({stream, stream}) == 1
        start, end = torch.xla.Event(enable_timing=True), torch.xla.Event(enable_timing=True)
        start.record()
        with torch.xla.stream(torch.xla.Stream("xla:1")):
            y = torch.ones(2, device="xla") * 3
        assert y.device.index == 1
        stream.wait_stream(torch.xla.Stream("xla:1"))
        end.record(stream)
        assert start.elapsed_time(end) >= 0 and end.query()
        stream.wait_event(stream.record_event())
        stream.synchronize()
        assert stream.query()
        torch.ones(2, device="xla").record_stream(torch.Stream(device="xla"))
        with pytest.raises(RuntimeError, match="enable_timing=True"):
            torch.xla.Event().elapsed_time(end)

    def test_mixed_precision(self):
        assert torch.get_device_module("xla").amp.GradScaler is torch_xla.amp.GradScaler

    @pytest.mark.own_client("a plugin need not tell of its memory")
    def test_memory_and_types(self):
        assert torch.xla.get_amp_supported_dtype() == [torch.bfloat16, torch.float16]
        assert torch.xla.is_bf16_supported()
        assert 0 < torch.xla.memory_allocated() <= torch.xla.max_memory_allocated("xla:1")
        free, total = torch.xla.mem_get_info()
        assert 0 < free < total
        torch.xla.empty_cache()

    def test_forks_are_noticed(self):
        torch.ones(1, device="xla").item()
        assert torch.xla.is_initialized() and not torch.xla._is_in_bad_fork()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os._exit(0 if torch.xla._is_in_bad_fork() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_autograd_threads_start_before_the_first_xla_tensor():
    code = (
        "import torch\n"
        "import torch_xla\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "x = torch.ones(1, device='xla:1', requires_grad=True)\n"
        "(x * 3).sum().backward()\n"
        "assert x.grad.item() == 3\n"
    )
    python("-c", code, imported=True)


@pytest.mark.costs("a process that imports all anew")
def test_importing_is_quiet_and_small():
    code = (
        "import torch, sys, logging, threading\n"
        "before = set(sys.modules); level = logging.getLogger().handlers[:]\n"
        "import torch_xla\n"
        "assert not {'jax', 'jaxlib'} & set(sys.modules)\n"
        "assert logging.getLogger().handlers == level and threading.active_count() == 1\n"
        "assert torch_xla.runtime and torch_xla.core.xla_model and torch_xla.debug.metrics and torch_xla._XLAC\n"
    )
    result = python("-c", code)
    assert (result.stdout, result.stderr) == ("", "")


def test_version_is_recent_enough_for_every_caller():
    assert int(torch_xla.__version__.split(".")[0]) >= 3
    assert met


def test_a_callback_is_called_when_values_are_there() -> None:
    import threading

    from torch_xla.experimental import callback

    y = torch.arange(4.0, device="xla") * 2  # pending
    called = threading.Event()
    given: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> None:
        given.append(tensor)
        called.set()

    callback.on_ready_callback(y, note)
    assert called.wait(60)
    assert given[0] is y
    assert callback.on_ready_event(y).wait(60)
    assert y.tolist() == [0, 2, 4, 6]
