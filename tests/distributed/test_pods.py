"""Starting a command on all hosts of a TPU pod, and what a host of one learns from its metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from probes import PACKAGE

from torch_xla._core.device.environment import RankInfo, rank_info
from torch_xla.distributed import xla_dist


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name that writes its arguments, and runs the command as a host would."""
    program = tmp_path / "gcloud"
    program.write_text(f"""#!{sys.executable}
import json, subprocess, sys
json.dump(sys.argv[1:], open({str(tmp_path / "arguments")!r}, "w"))
command = next(a for a in sys.argv if a.startswith("--command=")).removeprefix("--command=")
sys.exit(subprocess.run(command, shell=True, cwd="/").returncode)
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "arguments"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_xla.distributed.xla_dist", *arguments]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.costs("a process that imports all anew")
def test_the_command_runs_in_this_folder_with_the_environment(gcloud: Path) -> None:
    done = start("--tpu=pod", "--zone=z", "--restart-tpuvm-pod-server", "--env=A=1 2", "--", "sh", "-c", "pwd; echo $A")
    assert done.stdout == f"{os.getcwd()}\n1 2\n", done.stderr
    arguments = json.loads(gcloud.read_text())
    assert arguments[:6] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--worker=all"]
    assert arguments[7:] == ["--zone=z"]


@pytest.mark.costs("a process that imports all anew")
def test_a_failure_is_told(gcloud: Path) -> None:
    done = start("--tpu=pod", "--", "false")
    assert done.returncode == 1 and "[xla_dist] false on pod failed with code 1" in done.stderr
    done = start("--tpu=pod", "--env=A", "--", "true")
    assert done.returncode == 1 and "[xla_dist] --env=A, expected NAME=VALUE" in done.stderr


def test_without_gcloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"\[xla_dist\] no program gcloud"):
        xla_dist.resolve_and_execute(xla_dist.get_args_parser().parse_args(["--tpu=pod", "--", "true"]))


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (["--docker-image=i"], "sudo docker run --rm --privileged --net=host --env A=b i python x.py"),
        (["--docker-container=c"], "sudo docker exec --env A=b c python x.py"),
    ],
)
def test_containers(options: list[str], command: str) -> None:
    arguments = ["--tpu=pod", "--env=A=b", *options, "--", "python", "x.py"]
    assert xla_dist._remote(xla_dist.get_args_parser().parse_args(arguments)) == command


@pytest.fixture
def metadata() -> Iterator[str]:
    """Address of a server that answers as Google's on the second host of two."""
    answers = {"worker-network-endpoints": "x:y:10.0.0.1,x:y:10.0.0.2", "agent-worker-number": "1"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Metadata-Flavor"] == "Google"
            answer = answers.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/")) if known else None
            self.send_response(200 if answer else 404)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_host_of_a_pod_asks_its_metadata(metadata: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_HOST", metadata)
    assert rank_info() == RankInfo()  # it is no TPU
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert rank_info() == RankInfo(1, 2, 0, 1, 1, "10.0.0.1", 29500)
