"""Interpreters that have imported PyTorch, JAX and the package and have done nothing else, forked from one that waits.

A test that needs a process of its own mostly needs no fresh import of all that, which takes two seconds each time. The
program, of ``python -c``, ``-m`` or a script, is the main module, and the interpreter ends as one does. Variables that
imports may read have a waiting interpreter for each of their values. Whose matter are imports, addresses or hash seeds
takes a fresh one.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path

_CHANGING = ("PYTEST_CURRENT_TEST", "XLA_HOST_COMPUTE", "XLA_VERIFY_GRAPHS")
_AT_IMPORT = ("XLA_AUTO_BARRIER", "XLA_HLO_DEBUG", "XLA_USE_32BIT_LONG")
_MOST = 3  # that wait at one time
_Server = tuple[subprocess.Popen[bytes], socket.socket]
_servers: dict[frozenset[tuple[str, str]], _Server] = {}  # by their variables; those used last at the end
_lock = threading.Lock()


class Program:
    """One that runs, as `subprocess.Popen` has it."""

    def __init__(self, arguments: list[str], pid: int, ended: int, stdin: int, stdout: int, stderr: int) -> None:
        self.args = [sys.executable, *arguments]
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = os.fdopen(stdin, "w", encoding="utf-8")
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end in (stdout, stderr))
        self._ended = ended

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it prints until it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not in so many seconds, and is killed.
        """
        with suppress(BrokenPipeError):
            self.stdin.close()
        texts = {}
        readers = [
            threading.Thread(target=lambda file=file: texts.__setitem__(file, file.read()), daemon=True)
            for file in (self.stdout, self.stderr)
        ]
        for reader in readers:
            reader.start()
        if self.returncode is None:
            self._wait(timeout)
        for reader in readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()
        return texts[self.stdout], texts[self.stderr]

    def kill(self) -> None:
        """Ends it, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait(None)

    def _wait(self, timeout: float | None) -> None:
        if not select.select([self._ended], [], [], timeout)[0]:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.returncode = os.waitstatus_to_exitcode(int.from_bytes(os.read(self._ended, 8), "little"))
        os.close(self._ended)


def start(arguments: list[str], environment: dict[str, str], cwd: Path | None) -> Program:
    """Starts a program."""
    with _lock:
        _, pipe = _running({name: environment[name] for name in _AT_IMPORT if name in environment})
        own, theirs = zip(os.pipe()[::-1], os.pipe(), os.pipe(), os.pipe(), strict=True)
        request = json.dumps([arguments, environment, str(cwd or os.getcwd())]).encode()
        socket.send_fds(pipe, [len(request).to_bytes(8, "little")], [*theirs])
        pipe.sendall(request)
        for end in theirs:
            os.close(end)
    stdin, stdout, stderr, ended = own
    return Program(arguments, int.from_bytes(os.read(ended, 8), "little"), ended, stdin, stdout, stderr)


def _running(early: dict[str, str]) -> _Server:
    """One whose imports have seen this process's variables, apart from those that each test changes."""
    environment = {name: value for name, value in os.environ.items() if name not in _CHANGING} | early
    key = frozenset(environment.items())
    server = _servers.pop(key, None)
    if server is None or server[0].poll() is not None:
        here, there = socket.socketpair()
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, str(Path(__file__).resolve()), str(there.fileno())]
        process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        server = process, here
    _servers[key] = server
    while len(_servers) > _MOST:
        _end(*_servers.pop(next(iter(_servers))))
    return server


@atexit.register
def _end_all() -> None:
    for server in _servers.values():
        _end(*server)


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


def _forget(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _next_program(pipe: socket.socket) -> tuple[str, str]:
    """Forks for each request; returns in the child, with -c, -m or nothing and what follows that.

    The parent leaves when nobody can ask.
    """
    signal.signal(signal.SIGCHLD, _forget)
    while True:
        head, ends, _, _ = socket.recv_fds(pipe, 8, 4)
        if not head:
            os._exit(0)
        arguments, environment, cwd = json.loads(_exactly(pipe, int.from_bytes(head, "little")))
        if os.fork():
            for end in ends:
                os.close(end)
            continue
        pipe.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *standard, ended = ends
        pid = os.fork()
        if pid:  # it waits
            for end in standard:
                os.close(end)
            os.write(ended, pid.to_bytes(8, "little"))
            os.write(ended, os.waitpid(pid, 0)[1].to_bytes(8, "little"))
            os._exit(0)
        os.close(ended)
        for place, end in enumerate(standard):
            os.dup2(end, place)
            os.close(end)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        for name in reversed(environment["PYTHONPATH"].split(os.pathsep)):
            sys.path.insert(0, name)
        option = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
        sys.path.insert(0, "" if option else os.path.dirname(arguments[0]))
        sys.argv[:] = ["-c" if option == "-c" else arguments[0], *arguments[1:]]
        if "JAX_NUM_CPU_DEVICES" in environment:
            import jax

            jax.config.update("jax_num_cpu_devices", int(environment["JAX_NUM_CPU_DEVICES"]))
        return option, str(arguments[0])


if __name__ == "__main__":
    import jax.numpy  # noqa: F401

    import torch_xla._core.execute.preload  # noqa: F401

    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1
    _option, _program = _next_program(socket.socket(fileno=int(sys.argv[1])))
    _main = sys.modules["__main__"] = types.ModuleType("__main__")
    if _option == "-c":
        exec(compile(_program, "<string>", "exec"), _main.__dict__)
    elif _option == "-m":
        runpy.run_module(_program, run_name="__main__", alter_sys=True)
    else:
        _main.__file__ = _program
        exec(compile(Path(_program).read_bytes(), _program, "exec"), _main.__dict__)
