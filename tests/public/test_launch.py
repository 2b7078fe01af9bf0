"""Starting a job: what is refused, and jobs of one process; `tests/job` has those of several."""

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
    torch_xla.launch(lambda index: calls.append(os.getpid()), debug_single_process=True)
    assert calls == [(0, 1, "x"), os.getpid()]


def test_spawn_calls_the_function_here():
    results = []

    def work(index, scale):
        x = torch.ones(2, device=torch_xla.device()) * scale
        results.append((index, x.tolist()))

    assert xmp.spawn(work, args=(3,), nprocs=1, start_method="fork") is None
    assert results == [(0, [3, 3])]


def test_its_exceptions_come_through():
    def fail(index):
        raise KeyError(index)

    with pytest.raises(KeyError):
        torch_xla.launch(fail, debug_single_process=True)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"nprocs": 5}, ValueError, "nprocs=5, expected 1 to 4, the devices of this host"),
        ({"nprocs": 0}, ValueError, "nprocs=0, expected 1 to 4"),
        ({"start_method": "thread"}, ValueError, "start_method='thread', expected 'spawn', 'fork' or 'forkserver'"),
    ],
)
def test_bad_arguments(kwargs, error, text):
    with pytest.raises(error, match=rf"\[spawn\] {text}"):
        xmp.spawn(print, **kwargs)


def test_what_cannot_be_sent_or_copied():
    with pytest.raises(
        RuntimeError, match=r"\[launch\] a function or an argument of .* that cannot be sent to another process"
    ):
        torch_xla.launch(lambda index: None)
    torch.ones(1, device="xla")
    torch_xla.sync()
    with pytest.raises(
        RuntimeError, match=r"\[launch\] start_method='fork' after this process has used the xla device"
    ):
        torch_xla.launch(print, start_method="fork")


def test_under_torchrun_the_process_exists_already(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    calls = []
    torch_xla.launch(lambda *args: calls.append(args), args=(5,))
    assert calls == [(0, 5)]


@pytest.mark.costs("processes of a job, which start and compile each for itself")
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
    assert python(script, devices=1, imported=True).stdout == "0 6.0\n"


@pytest.mark.costs("processes of a job, which start and compile each for itself")
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
    assert python(script, devices=1, imported=True).stdout == "1 [[3.0, 3.0]]\n"


def test_wrappers():
    model = torch.nn.Linear(2, 2)
    assert xmp.MpModelWrapper(model).to("xla") is model and model.weight.device.type == "xla"
    assert xmp.MpSerialExecutor().run(lambda: 5) == 5
