"""Interpreters that have imported PyTorch, JAX and the package and have done nothing else, forked from one that waits.

A test that needs a process of its own mostly needs no fresh import of all that, which takes two seconds each time. The
program, of ``python -c`` or a script, is the main module, and the interpreter ends as one does. Variables that the
package reads at its import have a waiting interpreter for each of their values. Whose matter are imports, addresses or
hash seeds takes a fresh one.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

_CHANGING = ("PYTEST_CURRENT_TEST", "XLA_COMPILE_WHEN_HOT", "XLA_HOST_COMPUTE", "XLA_VERIFY_GRAPHS")
_Server = tuple[subprocess.Popen[bytes], socket.socket, dict[str, str]]
_AT_IMPORT = ("XLA_AUTO_BARRIER", "XLA_HLO_DEBUG", "XLA_USE_32BIT_LONG")
_Early = tuple[tuple[str, str], ...]
_servers: dict[_Early, _Server] = {}
_lock = threading.Lock()


def _surroundings() -> dict[str, str]:
    """This process's variables, apart from those that each test changes; what sees them when it is imported?"""
    return {name: value for name, value in os.environ.items() if name not in _CHANGING}


def run(
    arguments: list[str], environment: dict[str, str], cwd: Path | None, timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """Runs a program; None where a test has changed variables that the imports may have read."""
    with _lock:
        early = tuple((name, environment[name]) for name in _AT_IMPORT if name in environment)
        _, pipe, started_in = _running(early)
        if _surroundings() != started_in:
            return None
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        request = json.dumps([arguments, environment, str(cwd or os.getcwd())]).encode()
        socket.send_fds(pipe, [len(request).to_bytes(8, "little")], [out_end, err_end])
        pipe.sendall(request)
        os.close(out_end)
        os.close(err_end)
        pid = int.from_bytes(_exactly(pipe, 8), "little")
        texts: dict[int, str] = {}

        def read(end: int) -> None:
            with open(end, encoding="utf-8") as file:
                texts[end] = file.read()

        readers = [threading.Thread(target=read, args=(end,), daemon=True) for end in (out, err)]
        for reader in readers:
            reader.start()
        pipe.settimeout(timeout)
        try:
            status = int.from_bytes(_exactly(pipe, 8), "little")
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            pipe.settimeout(None)
            _exactly(pipe, 8)
            raise subprocess.TimeoutExpired(arguments, timeout) from None
        finally:
            pipe.settimeout(None)
        for reader in readers:
            reader.join()
    command = [sys.executable, *arguments]
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), texts[out], texts[err])


def _running(early: _Early) -> _Server:
    server = _servers.get(early)
    if server is None or server[0].poll() is not None:
        here, there = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **dict(early)}
        command = [sys.executable, str(Path(__file__).resolve()), str(there.fileno())]
        process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        server = _servers[early] = process, here, _surroundings()
        atexit.register(_end, process, here)
    return server


def _end(process: subprocess.Popen[bytes], pipe: socket.socket) -> None:
    pipe.close()
    process.wait()


def _exactly(pipe: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = pipe.recv(count - len(parts))
        if not part:
            raise EOFError("the process that forks others has ended")
        parts += part
    return parts


def _next_program(pipe: socket.socket) -> str:
    """Forks for each request; returns in the child, with the program or path. The parent leaves when nobody can ask."""
    while True:
        head, ends, _, _ = socket.recv_fds(pipe, 8, 2)
        if not head:
            os._exit(0)
        arguments, environment, cwd = json.loads(_exactly(pipe, int.from_bytes(head, "little")))
        pid = os.fork()
        if pid:
            for end in ends:
                os.close(end)
            pipe.sendall(pid.to_bytes(8, "little"))
            pipe.sendall(os.waitpid(pid, 0)[1].to_bytes(8, "little"))
            continue
        pipe.close()
        for end, place in zip(ends, (1, 2), strict=True):
            os.dup2(end, place)
            os.close(end)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        for name in reversed(environment["PYTHONPATH"].split(os.pathsep)):
            sys.path.insert(0, name)
        program = arguments[1:] if arguments[0] == "-c" else arguments
        sys.path.insert(0, "" if arguments[0] == "-c" else os.path.dirname(program[0]))
        sys.argv[:] = ["-c" if arguments[0] == "-c" else program[0], *program[1:]]
        if "JAX_NUM_CPU_DEVICES" in environment:
            import jax

            jax.config.update("jax_num_cpu_devices", int(environment["JAX_NUM_CPU_DEVICES"]))
        return str(program[0])


if __name__ == "__main__":
    import jax.numpy  # noqa: F401

    import torch_xla._core.execute.preload  # noqa: F401

    assert threading.active_count() == 1
    _program = _next_program(socket.socket(fileno=int(sys.argv[1])))
    _main = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        exec(compile(_program, "<string>", "exec"), _main.__dict__)
    else:
        _main.__file__ = _program
        exec(compile(Path(_program).read_bytes(), _program, "exec"), _main.__dict__)
