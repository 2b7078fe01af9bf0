"""Profiles: what is in them, servers and clients, and what happens where one cannot be had."""

import os
import re
import socket
import sys
import threading
from pathlib import Path

import jax
import pytest
import torch

import torch_xla
from torch_xla import _capture
from torch_xla._core.compile import cache
from torch_xla.debug import _profiler_server, capture_profile
from torch_xla.debug import profiler as xp
from torch_xla.utils.utils import get_free_tcp_ports

X = torch.arange(12.0).reshape(3, 4)


def train(steps=2):
    """A few steps with a new graph, a read and a named block."""
    x = X.to("xla")
    for step in range(steps):
        with xp.StepTrace("train", step_num=step):
            with xp.Trace("attention", layer=3):
                y = (x * 3).tanh()
            total = xp.trace_me("loss")(torch.sum)(y)
        assert total.item() == pytest.approx((X * 3).tanh().sum().item())


def rows(folder: Path) -> list[list]:
    """The events of each line of the host in the profile under a folder."""
    (path,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return [list(line.events) for plane in planes if plane.name == "/host:CPU" for line in plane.lines]


def names(folder: Path) -> set[str]:
    return {event.name for line in rows(folder) for event in line}


@pytest.fixture
def port():
    number = get_free_tcp_ports()[0]
    server = xp.start_server(number)
    yield number
    server.stop()


def test_a_trace_has_rows_of_the_host(tmp_path):
    cache.clear()
    xp.start_trace(tmp_path)
    train()
    xp.stop_trace()
    expected = {"train", "attention", "loss", "recording", "barrier", "lowering", "compiling", "starting the program"}
    assert expected | {"reading a value", "TransferFromDevice", "TransferToDevice"} <= names(tmp_path)
    assert not _capture.on()
    own = [line for line in rows(tmp_path) if any(event.name == "train" for event in line)]
    assert len(own) == 1
    steps = [event for event in own[0] if event.name == "train"]
    assert [dict(event.stats)["step_num"] for event in steps] == [0, 1]
    # Rows lie in each other or beside each other, never half over each other.
    ours = sorted((e.start_ns, -e.end_ns) for e in own[0] if e.name in expected | {"reading a value"})
    open_until: list[float] = []
    for start, end in ((start, -end) for start, end in ours):
        open_until = [other for other in open_until if other > start]
        assert all(end <= other for other in open_until)
        open_until.append(end)


def test_a_named_block_belongs_to_one_step():
    @xp.trace_me("loss")
    def loss():
        torch_xla.sync()

    x = X.to("xla") + 1
    says = r"\[profiler\] Expecting scope to be empty but it is attention\.1.*reset_scope=False"
    with pytest.raises(RuntimeError, match=says), xp.Trace("attention"):
        torch_xla.sync()
    with pytest.raises(RuntimeError, match=r"scope to be empty but it is loss\.2"), xp.Trace("model"):
        loss()
    with xp.Trace("attention"):
        torch_xla.sync(reset_scope=False)
        assert x.cpu().equal(X + 1)
    with xp.StepTrace("train"):
        torch_xla.sync()
    torch_xla.sync()


def test_a_second_trace_and_a_stop_without_one_are_errors(tmp_path):
    with pytest.raises(RuntimeError, match=r"\[profiler\] No profile started"):
        xp.stop_trace()
    xp.start_trace(tmp_path / "first")
    with pytest.raises(RuntimeError, match=r"\[profiler\] .*Only one profile may be run at a time\."):
        xp.start_trace(tmp_path / "second")
    train()
    xp.stop_trace()
    assert "train" in names(tmp_path / "first")
    xp.start_trace(tmp_path / "third")
    xp.stop_trace()
    train()


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RuntimeError, match=r"\[profiler\] log directory .*file/sub' cannot be written"):
        xp.start_trace(file / "sub")
    with pytest.raises(RuntimeError, match=r"\[profiler\] log directory"):
        xp.trace("localhost:1", str(file / "sub"))
    xp.start_trace(tmp_path / "folder")
    train()
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("")
    with pytest.raises(RuntimeError, match=r"\[profiler\] the trace was not written"):
        xp.stop_trace()
    train()
    xp.start_trace(tmp_path / "another")
    train()
    xp.stop_trace()
    assert "train" in names(tmp_path / "another")


def test_a_server_is_asked_for_a_profile(tmp_path, port):
    pytest.importorskip("xprof", reason="the client is in extra [profile]")
    train()  # so that no compile takes up the time that is traced
    thread = xp.trace_detached(f"localhost:{port}", str(tmp_path), duration_ms=500)
    while thread.is_alive():
        train()
    assert {"train", "attention", "recording", "starting the program"} <= names(tmp_path)


def test_the_command_line(tmp_path, port, capsys):
    pytest.importorskip("xprof", reason="the client is in extra [profile]")
    train()
    status: list[int] = []
    arguments = ["--service_addr", f"localhost:{port}", "--logdir", str(tmp_path), "--duration_ms", "500"]
    thread = threading.Thread(target=lambda: status.append(capture_profile.main(arguments)))
    thread.start()
    while thread.is_alive():
        train()
    assert status == [0] and "train" in names(tmp_path)
    assert f"profile written below {tmp_path}" in capsys.readouterr().out


def test_no_server(tmp_path, capsys):
    pytest.importorskip("xprof", reason="the client is in extra [profile]")
    address = f"localhost:{get_free_tcp_ports()[0]}"
    with pytest.raises(RuntimeError, match=rf"\[profiler\] no answer from {address} within 0 s"):
        xp.trace(address, str(tmp_path), timeout_s=0)
    assert capture_profile.main(["--service_addr", address, "--logdir", str(tmp_path), "--timeout_s=0"]) == 1
    assert f"no answer from {address}" in capsys.readouterr().err
    xp.trace_detached(address, str(tmp_path), timeout_s=0).join()
    assert f"no answer from {address}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"\[profiler\] address 'here', expected host:port"):
        xp.trace("here", str(tmp_path))


def test_no_client(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xprof.convert._pywrap_profiler_plugin", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'torch_xla[profile]'")):
        xp.trace("localhost:1", str(tmp_path))


def bound(port: int) -> list[bytes]:
    """The network interface of each socket that listens on a port."""
    results = []
    for descriptor in _profiler_server._listeners(port):
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            results.append(listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0"))
    return results


@pytest.mark.skipif(not hasattr(socket, "SO_BINDTODEVICE"), reason="Linux alone has the option")
def test_a_server_answers_this_machine_alone(monkeypatch):
    port = get_free_tcp_ports()[0]
    server = xp.start_server(port)
    assert bound(port) == [b"lo"] and _capture.on()
    assert xp.start_server(port) is server
    with pytest.raises(RuntimeError, match=rf"\[profiler\] .*has a server on port {port}"):
        xp.start_server(get_free_tcp_ports()[0])
    del server
    assert bound(port) == [] and not _capture.on()
    monkeypatch.setenv("XLA_PROFILER_ANY_HOST", "1")
    server = xp.start_server(port)
    assert bound(port) == [b""]
    server.stop()


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"\[profiler\] port {port}, which a server cannot have"):
            xp.start_server(port)
    with pytest.raises(RuntimeError, match=r"\[profiler\] port 70000"):
        xp.start_server(70000)
    train()
