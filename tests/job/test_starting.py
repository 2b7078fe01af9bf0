"""The ways to start a job: from where, by what, and what each process is told about itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import starts
import warm
from probes import PACKAGE, python, start

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")

FOLDER = Path(__file__).parent


def run(tmp_path: Path, text: str, devices: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script beside the module of these tests."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{text}")
    return python(script, *arguments, devices=devices, imported=True)


COUNTED = pytest.mark.own_client("it is told how many devices it has by CPU_NUM_DEVICES")


def check(folder: Path, world: int, local_world: int | None = None) -> None:
    result = starts.read_places(folder)
    assert result == [starts.expected(rank, world, local_world or world) for rank in range(world)]


@COUNTED
def test_from_a_module_after_the_device_was_used(tmp_path: Path) -> None:
    run(tmp_path, """
import torch, torch_xla, starts
if __name__ == "__main__":
    assert torch.ones(2, device="xla:1").sum().item() == 2
    torch_xla.launch(starts.write_place, (sys.argv[1],))
    torch_xla.launch(starts.take_turns, (sys.argv[1],))
    assert torch.ones(2, device="xla:1").sum().item() == 2
""", 2, tmp_path)  # fmt: skip
    check(tmp_path, 2)


def test_from_the_script_itself_and_without_waiting(tmp_path: Path) -> None:
    run(tmp_path, """
import torch_xla.distributed.xla_multiprocessing as xmp, starts
def main(index, folder):
    starts.write_place(index, folder)
if __name__ == "__main__":
    context = xmp.spawn(main, (sys.argv[1],), nprocs=2, join=False)
    assert len(context.pids()) == 2
    while not context.join(60):
        pass
""", 4, tmp_path)  # fmt: skip
    check(tmp_path, 2)


@COUNTED
def test_by_fork_after_a_job_that_failed(tmp_path: Path) -> None:
    run(tmp_path, """
import gc, torch_xla, starts
def fail(index):
    raise ValueError("no data")
def collect(index, folder):
    gc.collect()  # finds the store of the first job, whose thread is not here
    starts.write_place(index, folder)
try:
    torch_xla.launch(fail, start_method="fork")
except Exception as error:
    error.itself = error
torch_xla.launch(collect, (sys.argv[1],), start_method="fork")
""", 2, tmp_path)  # fmt: skip
    check(tmp_path, 2)


@COUNTED
def test_a_process_that_is_ended_says_where_it_was(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import time, torch, torch_xla, torch_xla.core.xla_model as xm
def computes():
    time.sleep(60)
def work(index):
    xm.rendezvous("start")
    if index == 1:
        raise ValueError("no data")
    computes()
if __name__ == "__main__":
    torch_xla.launch(work)
""")
    done = python(script, devices=2, check=False, imported=True)
    assert "ValueError: no data" in done.stderr
    assert f'File "{script}", line 4 in computes' in done.stderr, done.stderr


@COUNTED
def test_what_the_processes_return(tmp_path: Path) -> None:
    run(tmp_path, """
import torch, torch.multiprocessing as mp, starts
from torch_xla._internal import pjrt
if __name__ == "__main__":
    assert pjrt.run_multiprocess(starts.place, 7) == {i: starts.expected(i, 2, 2) | {"index": 7} for i in range(2)}
    found = pjrt.run_multiprocess(torch.full, (2,), 3.0, device="xla")
    assert {rank: (str(x.device), x.tolist()) for rank, x in found.items()} == dict.fromkeys((0, 1), ("xla:0", [3, 3]))
    try:
        pjrt.run_multiprocess(starts.refuse, "this", sys.argv[1])
    except KeyError as error:
        assert error.args == ("this",)
    else:
        raise AssertionError("nothing was raised")
""", 2, tmp_path)  # fmt: skip


@COUNTED
def test_from_a_cell_of_a_notebook(tmp_path: Path) -> None:
    """Cells define functions that no new interpreter finds; wrapped models are the parent's."""
    run(tmp_path, """
import torch, torch_xla, torch_xla.distributed.xla_multiprocessing as xmp
scope = {"__name__": "__main__", "folder": sys.argv[1]}
exec('''
import torch, starts
import torch_xla.distributed.xla_multiprocessing as xmp
wrapped = xmp.MpModelWrapper(torch.nn.Linear(2, 2))
def cell(index, scale):
    starts.write_place(index, folder)
    assert wrapped.to("xla").weight.is_xla and scale == 3
xmp.spawn(cell, (3,), start_method="fork")
''', scope)
""", 2, tmp_path)  # fmt: skip
    check(tmp_path, 2)


def test_a_function_that_new_processes_do_not_find(tmp_path: Path) -> None:
    code = "import torch_xla\ndef cell(index): pass\ntorch_xla.launch(cell)"
    done = python("-c", code, devices=2, check=False, imported=True)
    assert done.returncode == 1
    assert "[launch]" in done.stderr.splitlines()[-1] and "start_method='fork'" in done.stderr


def test_by_torchrun(tmp_path: Path) -> None:
    run_by = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python(*run_by, FOLDER / "starts.py", tmp_path, devices=1, imported=True)
    result = starts.read_places(tmp_path)
    assert result == [starts.expected(rank, 2, 2) for rank in range(2)]


def listening(pids: list[int]) -> list[str]:
    """Addresses at which processes listen."""
    results = []
    for pid in pids:
        sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                    results.append(local.rpartition(":")[0])
    return results


def report_listeners(index: int, folder: str) -> None:
    starts.place(index)
    addresses = listening([os.getpid(), os.getppid()])
    (Path(folder) / f"{index}.txt").write_text("\n".join(addresses))


@pytest.mark.parametrize("collectives", ["", "xla"])
def test_nothing_listens_beyond_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collectives: str) -> None:
    if collectives:
        monkeypatch.setenv("XLA_CPU_COLLECTIVES", collectives)
    launcher.run(report_listeners, (str(tmp_path),), 2)
    own = listening([os.getpid()])
    result = "\n".join(file.read_text() for file in tmp_path.glob("*.txt")).split() + own
    local = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert result and set(result) <= {local, "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def hosts(count: int) -> list[str]:
    """Names of network namespaces that reach each other."""
    names = [f"torch-xla-{os.getpid()}-{i}" for i in range(count)]
    bridge = f"txla{os.getpid()}"
    commands = [f"ip link add {bridge} type bridge", f"ip link set {bridge} up"]
    for i, name in enumerate(names):
        end = f"tx{i}-{os.getpid()}"
        commands += [
            f"ip netns add {name}",
            f"ip link add {end} type veth peer name eth0 netns {name}",
            f"ip link set {end} master {bridge} up",
            f"ip -n {name} addr add 10.211.0.{i + 1}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ]
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            remove_hosts(names, bridge)
            pytest.skip(f"no network namespaces here: {command}: {done.stderr.strip()}")
    return [*names, bridge]


def remove_hosts(names: list[str], bridge: str) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def assert_ended(processes: list[warm.Program | subprocess.Popen[str]]) -> None:
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


@COUNTED
@pytest.mark.skipif(shutil.which("ip") is None, reason="no program ip, which makes network namespaces")
def test_two_hosts_of_two_processes(tmp_path: Path) -> None:
    *names, bridge = hosts(2)
    try:
        both = []
        for rank, name in enumerate(names):
            env = {**os.environ, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{FOLDER}", "CPU_NUM_DEVICES": "2"}
            env |= {"MASTER_ADDR": "10.211.0.1", "MASTER_PORT": "29511", "RANK": str(rank), "WORLD_SIZE": "2"}
            command = ["ip", "netns", "exec", name, sys.executable, str(FOLDER / "starts.py"), str(tmp_path)]
            both.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        assert_ended(both)
    finally:
        remove_hosts(names, bridge)
    check(tmp_path, 4, local_world=2)


CUT_OFF = """
import time, torch_xla.core.xla_model as xm
xm.rendezvous("start")
print("started", flush=True)
time.sleep(1)
xm.rendezvous("next")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ip") is None, reason="no program ip, which makes network namespaces")
def test_a_host_that_is_cut_off() -> None:
    """Both hosts end in time: that with the store, and that which waits for its answer."""
    *names, bridge = hosts(2)
    both = []
    try:
        for rank, name in enumerate(names):
            env = {**os.environ, "PYTHONPATH": str(PACKAGE), "CPU_NUM_DEVICES": "1", "XLA_COLLECTIVE_TIMEOUT": "4"}
            env |= {"MASTER_ADDR": "10.211.0.1", "MASTER_PORT": "29512", "RANK": str(rank), "WORLD_SIZE": "2"}
            command = ["ip", "netns", "exec", name, sys.executable, "-c", CUT_OFF]
            pipe = subprocess.PIPE
            both.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
        for process in both:
            assert process.stdout is not None and process.stdout.readline() == "started\n"
        subprocess.run(["ip", "link", "set", f"tx1-{os.getpid()}", "down"], check=True)
        errors = [process.communicate(timeout=40)[1] for process in both]
    finally:
        for process in both:
            process.kill()
        remove_hosts(names, bridge)
    assert [process.returncode for process in both] == [1, 1], errors
    # Here rank 0 sees that process 1 is gone; between real hosts it has waited for it.
    assert "rank 1 has ended (it was killed)" in errors[0] or "rank 0 waited" in errors[0], errors[0]
    assert "lost the connection to 10.211.0.1:29512" in errors[1], errors[1]


@COUNTED
def test_hosts_by_hand_on_one_machine(tmp_path: Path) -> None:
    """Two launchers that stand for two hosts; the first has the store."""
    port = str(free_port())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [start(FOLDER / "starts.py", tmp_path, devices=2, imported=True, **env, RANK=rank) for rank in "01"]
    assert_ended(both)
    check(tmp_path, 4, local_world=2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
