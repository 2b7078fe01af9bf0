"""Starting the processes of a job on this host.

They are forked from a process that has imported what they need and has used no device, so that the imports are paid for
once. The launcher listens at the port where they meet, which therefore outlives each of them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from typing import Any

from torch_xla import _config, _notices
from torch_xla._core.device import client, described, environment, pjrt_plugins
from torch_xla._core.job import connection, orphans, session, store, tries
from torch_xla._core.job import processes as started
from torch_xla._errors import listing, message

START_METHODS = ("spawn", "fork", "forkserver")
_PRELOADED = "torch_xla._core.execute.preload"


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    processes: int,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    modules: Sequence[str] = (),
) -> Any:
    """Runs ``fn(rank, *args)`` in new processes, which are a job, or this host's part of one.

    If the environment makes this process one of several, each of these stands for one host and starts `processes`
    processes. With `daemon` they end with this process. ``"spawn"`` and ``"forkserver"`` import the main script anew in
    each, ``"fork"`` copies this process; `modules` are imported before `fn` is called. Without `join` PyTorch's process
    context is returned at once.

    Raises ValueError for another start method, RuntimeError where this process has used the device, and cannot be
    copied, or `fn` cannot be sent, JobError where other hosts cannot be reached,
    torch.multiprocessing.ProcessRaisedException with the traceback of a process that raised, and ProcessExitedException
    where one was killed, or exited otherwise.
    """
    import torch.multiprocessing as mp

    if described.topology() is not None:
        return _run_here(fn, args, processes)
    if start_method not in START_METHODS:
        raise ValueError(message("launch", f"start_method={start_method!r}", expected=listing(START_METHODS)))
    if start_method == "fork":
        if client.client_started():
            raise RuntimeError(
                message(
                    "launch",
                    "start_method='fork' after this process has used the xla device, whose client cannot be copied",
                    do="start the processes before the first xla tensor, or use start_method='spawn'",
                )
            )
    else:
        _check_importable(fn)
        if sys.platform == "linux":
            start_method = "forkserver"
    host = environment.rank_info()
    if host.world == 1:
        server, try_name = store.listen("127.0.0.1", 0), "0"
        host = replace(host, address="127.0.0.1", port=server.port)
    else:
        server = store.connect(host, serves=host.rank == 0 and not host.served)
        try_name = tries.name_of_try(server, host.rank, host.world, "hosts")
    entry = _Entry(fn, args, processes, host, client.device_type(), try_name, tuple(modules))
    try:
        with _preloading([_PRELOADED, *modules]):
            workers = mp.start_processes(entry, (), processes, False, daemon, start_method)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, pickle.PicklingError) as error:  # the first of them; none has been started
        raise _unsendable(fn, error) from error
    context = started.Processes(workers.processes, workers.error_files, server, try_name, host)
    if not join:
        return context
    while not context.join():
        pass
    return None


def _run_here(fn: Callable[..., Any], args: tuple[Any, ...], processes: int) -> None:
    """Runs a function in this process, as one of a job that has so many on each host of what is described."""
    if client.client_started():
        raise RuntimeError(
            message(
                "launch",
                "this process has used the xla device, and is to be one of a job's processes now",
                do="start the processes before the first xla tensor",
            )
        )
    if environment.rank_info().world == 1:
        environment.stand_for(processes * described.hosts(), processes)
    fn(environment.rank_info().rank, *args)
    session.finish()


@contextmanager
def _preloading(modules: list[str]) -> Iterator[None]:
    """A scope in which a fork server that starts imports these; outside, it imports what the program asked for."""
    previous_modules = list(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(modules)
    try:
        yield
    finally:
        multiprocessing.set_forkserver_preload(previous_modules)


def _check_importable(fn: Callable[..., Any]) -> None:
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__") and main.__spec__ is None:
        raise _unsendable(fn, "no file defines it")


def _unsendable(fn: Callable[..., Any], why: object) -> RuntimeError:
    return RuntimeError(
        message(
            "launch",
            f"a function or an argument of {getattr(fn, '__qualname__', fn)!r} that cannot be sent to another process "
            f"({why})",
            do="define it at the top level of a module, or use start_method='fork'",
        )
    )


@dataclass
class _Entry:
    """The function that a new process runs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    count: int  # processes of this host
    host: environment.RankInfo
    kind: str  # of device
    try_name: str
    modules: tuple[str, ...]
    # Who they are forked from has it as it was at the first launch.
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def __call__(self, index: int) -> None:
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        os.environ.update(self.environ)
        os.environ.update(variables(index, self.count, self.host, self.kind))
        _config.XLA_JOB_TRY.set(self.try_name)
        client.publish_count()
        for name in self.modules:  # whom this process was forked from may have been started for another job
            importlib.import_module(name)
        orphans.follow_launcher(session.end_orphan)
        try:
            self.fn(session.rank_info().rank, *self.args)
            session.finish()
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                if connection.is_consequence(error):  # the launcher raises that of the other one
                    rank, stack = session.rank_info().rank, traceback.format_exc()
                    _notices.notify("job", rank, f"[job] rank {rank} ends because of another, and was here: {stack}")
                session.leave(error)
            raise
        finally:
            session.leave()


def variables(index: int, count: int, host: environment.RankInfo, kind: str) -> dict[str, str]:
    """The environment of a process, by its number among `count` on its host, as torchrun would set it.

    `host` is this host among the others; each process has one device of a kind.
    """
    settings = {
        "RANK": str(host.rank * count + index),
        "WORLD_SIZE": str(host.world * count),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(host.rank),
        "MASTER_ADDR": str(host.address),
        "MASTER_PORT": str(host.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PJRT_LOCAL_PROCESS_RANK": str(index),
        "PJRT_LOCAL_PROCESS_COUNT": str(count),
        "PJRT_DEVICE": kind,
    }
    if kind == "CPU":
        settings["CPU_NUM_DEVICES"] = "1"
    elif kind in ("CUDA", "GPU", "ROCM"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = [v for v in visible.split(",") if v] if visible is not None else list(map(str, range(count)))
        settings["CUDA_VISIBLE_DEVICES"] = devices[index]
    elif kind == "TPU":
        settings |= {
            "TPU_VISIBLE_CHIPS": str(index),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_BOUNDS": f"1,{count},1",
            "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{8476 + i}" for i in range(count)),
            "TPU_PROCESS_PORT": str(8476 + index),
            "CLOUD_TPU_TASK_ID": str(index),
        }
    return settings


def processes_of_host() -> int:
    """How many processes a job has on this host, where nobody says: one per device."""
    if described.topology() is not None:
        return len(described.devices()) // described.hosts()
    plugin = pjrt_plugins.find(client.device_type())
    if plugin is not None:
        return plugin.physical_chip_count()
    if client.device_type() == "CPU":
        return _config.CPU_NUM_DEVICES.get()
    if client.client_started() or client.counts_without_client():
        return client.device_count()
    # Not by a client in this process: many devices can have but one, and the processes are to have them.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    with _preloading([_PRELOADED]), ProcessPoolExecutor(1, multiprocessing.get_context(method)) as one:
        return one.submit(_count, dict(os.environ)).result()


def _count(environ: dict[str, str]) -> int:
    os.environ.clear()
    os.environ.update(environ | {"RANK": "0", "WORLD_SIZE": "1"})  # no process of a job, of hosts or others
    return client.hardware_count()
