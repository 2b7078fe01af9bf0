"""Starting a job of one process."""

import os
import textwrap

import pytest
import torch
from probes import python

import torch_xla
import torch_xla.distributed.xla_multiprocessing as xmp


def test_launch_calls_the_function_here():
    calls = []
    assert torch_xla.launch(lambda *args: calls.append(args), args=(1, "x"), debug_single_process=True) is None
    torch_xla.launch(lambda index: calls.append(os.getpid()))
    assert calls == [(0, 1, "x"), os.getpid()]


@pytest.mark.parametrize("nprocs", [None, 1])
def test_spawn_calls_the_function_here(nprocs):
    results = []

    def work(index, scale):
        x = torch.ones(2, device=torch_xla.device()) * scale
        results.append((index, x.tolist()))

    assert xmp.spawn(work, args=(3,), nprocs=nprocs, start_method="fork") is None
    assert results == [(0, [3, 3])]


def test_its_exceptions_come_through():
    def fail(index):
        raise KeyError(index)

    with pytest.raises(KeyError):
        torch_xla.launch(fail)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"nprocs": 4}, NotImplementedError, "nprocs=4, expected 1 or None"),
        ({"nprocs": 0}, ValueError, "nprocs=0, expected 1 or None"),
        ({"start_method": "thread"}, ValueError, "start_method='thread', expected 'spawn', 'fork' or 'forkserver'"),
    ],
)
def test_bad_arguments(kwargs, error, text):
    with pytest.raises(error, match=rf"\[spawn\] {text}"):
        xmp.spawn(print, **kwargs)


def test_several_visible_devices_are_mentioned(caplog):
    xmp.spawn(lambda index: None)
    assert "4 devices are visible and one process is started" in caplog.text


def test_under_torchrun_the_process_exists_already(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    calls = []
    torch_xla.launch(lambda *args: calls.append(args), args=(5,))
    assert calls == [(0, 5)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotImplementedError, match="torchrun started 2 processes"):
        torch_xla.launch(print)


def test_a_script_that_starts_itself(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch_xla

            def main(index):
                x = torch.arange(4.0, device=torch_xla.device())
                torch_xla.sync()
                print(index, x.sum().item())

            if __name__ == "__main__":
                torch_xla.launch(main)
            """
        )
    )
    assert python(script).stdout == "0 6.0\n"


def test_a_process_group_needs_no_other_import(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import torch
import torch.distributed as dist
import torch_xla

def train(index):
    dist.init_process_group("xla", init_method="xla://")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to("xla"), broadcast_buffers=False)
    model(torch.ones(3, 2, device="xla")).sum().backward()
    print(dist.get_world_size(), model.module.weight.grad.tolist())

torch_xla.launch(train)
""")
    assert python(script).stdout == "1 [[3.0, 3.0]]\n"


def test_wrappers():
    model = torch.nn.Linear(2, 2)
    assert xmp.MpModelWrapper(model).to("xla") is model and model.weight.device.type == "xla"
    assert xmp.MpSerialExecutor().run(lambda: 5) == 5
