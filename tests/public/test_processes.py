"""Tensors on their way to another process, and device counts and indices that there cannot be."""

from __future__ import annotations

import os
import pickle
import re
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from probes import python
from torch import nn

import torch_xla
from torch_xla import _config


def sent(value: Any) -> Any:
    return pickle.loads(ForkingPickler.dumps(value))


class TestSent:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    def test_values_type_and_device(self, dtype: torch.dtype) -> None:
        x = torch.tensor([[1, 0], [2, 3]], device="xla:1").to(dtype)
        got = sent(x)
        assert got.dtype == dtype and got.device == x.device and got.tolist() == x.tolist()
        got.zero_()
        assert x[1, 1].item() != 0

    def test_pending_scalar_and_empty(self) -> None:
        assert sent(torch.ones(2, device="xla") + 1).tolist() == [2, 2]
        assert sent(torch.tensor(3.0, device="xla")).item() == 3
        assert sent(torch.empty(0, 2, device="xla")).shape == (0, 2)

    def test_parameters_and_gradient_flags(self) -> None:
        for grad in (True, False):
            p = sent(nn.Parameter(torch.ones(2, device="xla"), grad))
            assert type(p) is nn.Parameter and p.requires_grad is grad and p.device.type == "xla"
        assert sent(torch.ones(2, device="xla", requires_grad=True)).requires_grad
        y = torch.ones(2, device="xla", requires_grad=True) * 2
        with pytest.raises(RuntimeError, match="non-leaf tensor which requires_grad"):
            sent(y)
        assert sent(y.detach()).tolist() == [2, 2]

    def test_aliases_stay_aliases(self) -> None:
        x = torch.arange(6.0, device="xla")
        base, view, host = sent([x, x[2:4], torch.ones(1)])
        base.mul_(10)
        assert view.tolist() == [20, 30] and host.device.type == "cpu"
        module = nn.Linear(2, 2).to("xla")
        module.tied = module.weight
        got = sent(module)
        assert got.tied is got.weight
        assert torch.equal(got.weight.cpu(), module.weight.cpu())

    def test_by_value(self) -> None:
        """A spawned process takes file descriptors along, and those of host copies would be closed, or another's."""
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("xla")
        before = os.listdir("/proc/self/fd")
        raw = [ForkingPickler.dumps({"a": [module, x]}) for x in torch.arange(4.0, device="xla").unbind()]
        assert os.listdir("/proc/self/fd") == before
        for i, got in enumerate(map(pickle.loads, raw)):
            assert got["a"][1].item() == i
            assert torch.equal(got["a"][0][1].weight.cpu(), module[1].weight.cpu())
        conjugate = torch.tensor([1 + 2j], device="xla").conj()
        assert sent([conjugate, conjugate])[1].tolist() == [1 - 2j]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.parts[i]


def answer(model: nn.Module, tensors: dict[str, list[torch.Tensor]], queue: Any, back: Any) -> None:
    back.put((model(tensors["a"][1] + queue.get()) * tensors["a"][0]).tolist())


@pytest.mark.slow
def test_arguments_of_a_spawned_process_and_a_queue_to_it() -> None:
    context = mp.get_context("spawn")
    queue, back = context.Queue(), context.Queue()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).to("xla")
    tensors = {"a": [torch.tensor([2.0], device="xla"), torch.arange(3.0, device="xla")]}
    child = context.Process(target=answer, args=(model, tensors, queue, back))
    child.start()
    queue.put(torch.ones(3, device="xla"))
    expected = model(torch.arange(3.0, device="xla") + 1) * 2
    assert back.get(timeout=120) == pytest.approx(expected.tolist(), rel=1e-5)
    child.join()
    assert child.exitcode == 0


@pytest.mark.slow
def test_spawned_workers_of_a_loader_take_and_give_tensors() -> None:
    rows = Rows(*(torch.full((2,), float(i), device="xla") for i in range(3)))
    loader = torch.utils.data.DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [x.tolist() for x in loader] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.costs("it starts the interpreter that others are forked from")
def test_a_forked_process_is_told_why_it_cannot_take_one() -> None:
    done = python(
        "-c",
        """
import torch, torch_xla, torch.multiprocessing as mp
def take(queue, back):
    try:
        queue.get()
    except RuntimeError as error:
        back.put(str(error))
context = mp.get_context("fork")
queue, back = context.Queue(), context.Queue()
x = torch.ones(2).to("xla")
x.cpu()
child = context.Process(target=take, args=(queue, back))
child.start(); queue.put(x); print(back.get(timeout=60)); child.join()
""",
        devices=1,
        imported=True,
    )
    assert done.stdout.startswith("[device] this process was forked after the xla client had started")


@pytest.mark.costs("a process that imports all anew")
def test_more_devices_than_pytorch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    done = python("-c", "import torch_xla", check=False, CPU_NUM_DEVICES="128")
    last = done.stderr.strip().splitlines()[-1]
    expected = "[config] CPU_NUM_DEVICES='{}', expected a whole number from 1 to 127; unset it for 1"
    assert last == f"ValueError: {expected.format(128)}"
    monkeypatch.setenv("CPU_NUM_DEVICES", "200")
    with pytest.raises(ValueError, match=f"^{re.escape(expected.format(200))}$"):
        _config.CPU_NUM_DEVICES.get()


@pytest.mark.costs("a process that imports all anew")
def test_more_gpus_than_pytorch_counts() -> None:
    hidden = ",".join(map(str, range(128)))
    done = python("-c", "import torch_xla", check=False, PJRT_DEVICE="CUDA", CUDA_VISIBLE_DEVICES=hidden)
    assert "[device] got 128 devices, expected 1 to 127" in done.stderr


@pytest.mark.costs("a process that imports all anew")
def test_as_many_as_there_can_be() -> None:
    code = (
        "import torch, torch_xla\nx = torch.ones(2, device='xla:126') + 1\nprint(x.tolist(), torch.xla.device_count())"
    )
    assert python("-c", code, devices=127).stdout.split("\n")[0] == "[2.0, 2.0] 127"


@pytest.mark.parametrize("index", [127, 200, 256, -1])
def test_an_index_that_wraps_around(index: int) -> None:
    for use in (torch.xla.set_device, torch.xla.get_rng_state):
        with pytest.raises(RuntimeError, match=rf"\[device\] got device index {index}, expected 0 to 126"):
            use(index)
    assert torch.xla.current_device() == 0
    with pytest.raises(IndexError):
        torch_xla.device(index)


class TestGenerator:
    def test_graphs_do_not_depend_on_it(self, compiles: Any) -> None:
        results = []
        with compiles(1):
            for generator in (torch.Generator("xla").manual_seed(7), torch.Generator("xla").manual_seed(8), None):
                results.append(torch.rand(40, device="xla", generator=generator).cpu())
        assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])

    def test_states_are_checked_as_on_cuda(self) -> None:
        generator = torch.Generator("xla")
        state = generator.manual_seed(7).get_state()
        for wrong in (state.to("xla"), state.float(), state.to("meta")):
            with pytest.raises(TypeError, match="RNG state must be a torch.ByteTensor"):
                generator.set_state(wrong)
        with pytest.raises(RuntimeError, match="RNG state must be contiguous"):
            generator.set_state(torch.zeros(32, dtype=torch.uint8)[::2])
        with pytest.raises(RuntimeError, match="RNG state is wrong size"):
            generator.set_state(state[:8])
        assert torch.equal(generator.get_state(), state)

    def test_a_state_that_is_part_of_a_tensor(self) -> None:
        generator = torch.Generator("xla").manual_seed(7)
        expected = torch.rand(3, generator=generator, device="xla").tolist()
        state = torch.Generator("xla").manual_seed(7).get_state()
        generator.set_state(torch.cat((torch.zeros(1, dtype=torch.uint8), state))[1:])
        assert torch.rand(3, generator=generator, device="xla").tolist() == expected
