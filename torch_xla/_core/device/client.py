"""Has the PJRT client, through JAX, and its devices; the first xla tensor starts it, counting devices does not."""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from glob import glob
from typing import TYPE_CHECKING, Any

from torch_xla import _bindings, _config
from torch_xla._core.device import allocator, background, described, environment, jax_import, pjrt_plugins, shapes
from torch_xla._errors import message, one_line

if TYPE_CHECKING:
    import jax

_LONG = 86400  # seconds

# Where the processes of a job meet for a client that knows all their devices, how many they are and which this is.
Meeting = tuple[str, int, int]

_find_meeting: Callable[[], Meeting | None] | None = None
_everyone: tuple[jax.Device, ...] = ()
_processes = 0  # how many processes JAX was told of
_ends: list[Callable[[], None]] = []
_chosen: str | None = None
_started = False
_starting = threading.RLock()
_forked = False
_spmd: bool | None = None  # not asked yet


def device_type() -> str:
    """Kind of the devices: ``"CPU"``, ``"CUDA"``, ``"TPU"`` or the name of a plugin.

    Taken from ``PJRT_DEVICE``, else from what the machine has.
    """
    name = _chosen or _config.PJRT_DEVICE.get()
    if name is not None:
        return name.upper() if name.upper() in pjrt_plugins.OWN else name
    if described.topology() is not None:
        return described.platform().upper()
    return _detect_device_type()


@functools.cache
def _detect_device_type() -> str:
    if pjrt_plugins.tpu_chips() and importlib.util.find_spec("libtpu") is not None:
        return "TPU"
    if glob("/dev/nvidia[0-9]*") and pjrt_plugins.has_cuda():
        return "CUDA"
    return "CPU"


def set_device_type(name: str) -> None:
    """Chooses the kind of the devices; RuntimeError where the client runs already on another one."""
    global _chosen
    if _started and name.upper() != device_type().upper():
        raise RuntimeError(
            f"[device] got device type {name}, but the process already uses {device_type()}; "
            "choose before the first xla tensor"
        )
    _chosen = name
    os.environ["PJRT_DEVICE"] = name
    publish_count()


def _platform() -> str:
    return pjrt_plugins.platform_of(device_type())


def choose_plugin() -> None:
    """Has the plugin of the devices, where they are of one, say what decides over programs; starts no client."""
    if described.topology() is None:
        pjrt_plugins.choose(device_type())


def is_own_cpu() -> bool:
    """Whether the devices are those of JAX's own CPU client: they compute in this process's memory."""
    return _platform() == "cpu" and not (described.topology() or (_started and _of_plugin(_devices()[0])))


@functools.cache
def _of_plugin(device: jax.Device) -> bool:
    # What libraries say of themselves, which may be called cpu. From JAX 0.11 on its own client has the version too, 0.
    return bool(getattr(device.client, "is_c_api", hasattr(device.client, "pjrt_c_api_major_version")))


@functools.cache
def has_callbacks() -> bool:
    """Whether programs of the devices can call functions of this process. A plugin is asked by a program that does."""
    if is_own_cpu():
        return True
    if described.topology() is not None:  # nothing runs, and libtpu compiles such a program only where it does
        return False
    import jax
    import numpy as np

    device = _devices()[0]
    zero = jax.ShapeDtypeStruct((), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        with jax.ensure_compile_time_eval():  # a program may be traced here, of which this is no part
            program = jax.jit(lambda x: jax.pure_callback(lambda y: y, zero, x, vmap_method="sequential"))
            program(jax.device_put(np.float32(0), device)).block_until_ready()
    except Exception:  # lowering, compiling or running refuses it, each with an error of its own
        return False
    return True


def spmd() -> bool:
    """Whether all devices of the job are one xla device, over which tensors may be split."""
    global _spmd
    if _spmd is None:
        _spmd = False
        if _config.XLA_USE_SPMD.get():
            use_spmd()
    return _spmd


def use_spmd() -> None:
    """Makes all devices of the job one xla device; buffers that there are stay where they are."""
    global _spmd
    if not _config.XLA_USE_SPMD.get():  # for processes that this one starts, as 2.9 has it
        _config.XLA_USE_SPMD.set(True)
    if _spmd:
        return
    _spmd = True
    if described.topology() is not None and environment.rank_info().world == 1:  # a process for each host
        environment.stand_for(described.hosts(), 1)
    _bindings.set_spans_mesh(True)
    publish_count()


def device_count() -> int:
    """Number of xla devices of this process: with SPMD one, else one for each of its hardware."""
    return 1 if spmd() else hardware_count()


def hardware_count() -> int:
    """Number of devices that this process has. Asks the client only for kinds that cannot be counted otherwise."""
    if _started:
        return len(_devices())
    if described.topology() is not None:
        return len(_described()[0])
    platform = _platform()
    if platform == "cpu":
        return _config.CPU_NUM_DEVICES.get()
    if platform in ("cuda", "rocm"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return len([v for v in visible.split(",") if v]) if visible is not None else len(glob("/dev/nvidia[0-9]*"))
    if platform == "tpu":
        return pjrt_plugins.tpu_chips()
    return len(_devices())


def counts_without_client() -> bool:
    """Whether the devices can be counted before the client is started."""
    return described.topology() is None and _platform() in ("cpu", "cuda", "rocm", "tpu")


def publish_count() -> None:
    """Tells the recorder how many devices there are, as PyTorch's autograd asks it without starting a client."""
    if _started or spmd() or counts_without_client():
        _publish(max(device_count(), 1))
    else:
        # A plugin counts its devices only once started; the count may be too high, but not too low.
        _publish(32)


def _publish(count: int) -> None:
    _bindings.set_device_count(count)
    in_job = _config.WORLD_SIZE.is_set() and _config.WORLD_SIZE.get() > 1 and not spmd()
    has_one = count == 1 or (not _started and _platform() != "cpu")  # of those that others show, it will take one
    _bindings.set_own_index(_config.LOCAL_RANK.get() if in_job and has_one else 0)


def client_started() -> bool:
    """Whether the PJRT client runs."""
    return _started


def _devices() -> tuple[jax.Device, ...]:
    with _starting:  # threads may make their first tensors at the same time
        return _start()


@functools.cache
def _start() -> tuple[jax.Device, ...]:
    global _everyone
    import jax

    if described.topology() is not None:
        devices, _everyone = _described()
        _end_start(devices)
        return devices
    platform = _platform()
    if platform == "cpu" and _config.CPU_NUM_DEVICES.get() > 1:
        try:
            jax.config.update("jax_num_cpu_devices", _config.CPU_NUM_DEVICES.get())
        except RuntimeError:
            count = len(jax.local_devices(backend="cpu"))
            if count < _config.CPU_NUM_DEVICES.get():
                raise RuntimeError(
                    f"[device] got CPU_NUM_DEVICES={_config.CPU_NUM_DEVICES.get()}, but this process already runs JAX "
                    f"with {count} CPU device(s); create the first xla tensor before using JAX"
                ) from None
    meeting = _find_meeting() if _find_meeting is not None and _may_span() and not _processes else None
    if meeting is not None:
        _meet(*meeting)
    elif (
        not _processes
        and (plugin := pjrt_plugins.find(device_type())) is not None
        and plugin.requires_xla_coordinator()
    ):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        _meet(f"127.0.0.1:{port}", 1, 0)
    pjrt_plugins.give_to_jax(device_type())
    if platform == "cpu":
        allocator.keep_freed()
    try:
        devices = tuple(jax.local_devices(backend=platform))
    except Exception as error:  # a client's own, whatever it raises
        text = one_line(error)
        starting = "Unable to initialize backend "
        if text.startswith(starting) and not text.startswith(f"{starting}'{platform}'"):
            raise RuntimeError(
                f"[device] got another plugin beside PJRT_DEVICE={device_type()}, and JAX starts all ({text}); "
                f"uninstall it, take it out of {pjrt_plugins.NAMED}, or name in JAX_PLATFORMS those to start, such as "
                "cpu"
            ) from error
        raise RuntimeError(
            f"[device] got PJRT_DEVICE={device_type()}, available here: {', '.join(pjrt_plugins.available())}; set "
            f"PJRT_DEVICE to one of them ({text})"
        ) from error
    if platform == "cpu" and not _of_plugin(devices[0]):
        devices = devices[: _config.CPU_NUM_DEVICES.get()]
        from torch_xla.ops import host_kernel

        host_kernel.register()  # a program from disk may call it
    if _processes > 1:
        job_devices = tuple(sorted(jax.devices(platform), key=lambda device: (device.process_index, device.id)))
        first = {device.process_index: device for device in reversed(job_devices)}
        if len(first) == _processes:
            devices = devices if spmd() else devices[:1]  # JAX may know more; a process of a job has one
            _everyone = job_devices if spmd() else tuple(first[rank] for rank in sorted(first))
        elif spmd():
            raise RuntimeError(
                f"[spmd] got a job of {_processes} processes, but the client of each knows only its own "
                f"{len(devices)} device(s) of {device_type()}, so that no program spans them; start one process"
            )
        else:
            local_rank = _config.LOCAL_RANK.get()
            devices = devices[local_rank : local_rank + 1] or devices[:1]
    _end_start(devices)
    return devices


def _described() -> tuple[tuple[jax.Device, ...], tuple[jax.Device, ...]]:
    """The devices of this process and, in a job, those of all, which are not here."""
    if device_type().lower() != described.platform():
        raise RuntimeError(
            message(
                "ahead",
                f"got {_config.XLA_AHEAD.name}={described.topology()} and PJRT_DEVICE={device_type()}",
                expected=f"PJRT_DEVICE={described.platform().upper()}",
                do="unset one of them",
            )
        )
    info = environment.rank_info()
    return described.local_devices(info.rank, info.world, spmd())


def _end_start(devices: tuple[jax.Device, ...]) -> None:
    global _started
    _started = True
    _publish(1 if spmd() else len(devices))
    jax_import.restore_variables()
    # JAX has registered its own before: the latest is called first at exit and before a fork, and last after one.
    atexit.register(_finish_at_exit)
    enter_or_leave = partial(next, _forks_quietly())
    os.register_at_fork(before=enter_or_leave, after_in_parent=enter_or_leave, after_in_child=enter_or_leave)
    os.register_at_fork(after_in_child=_note_fork)


def _forks_quietly() -> Iterator[None]:
    """Around a fork, no warning of JAX's: workers of a DataLoader use no device, and those that do get our error."""
    while True:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="os.fork\\(\\) was called", category=RuntimeWarning)
            yield
        yield


def set_meeting(find: Callable[[], Meeting | None]) -> None:
    """Says who finds where a job's processes meet, when the client is about to start; called once, at import."""
    global _find_meeting
    _find_meeting = find


def _may_span() -> bool:
    if spmd() or described.topology() is not None:
        return True
    return _platform() != "cpu" or _config.XLA_CPU_COLLECTIVES.get() == "xla"


def spans_job() -> bool:
    """Whether programs of a job span the devices of all its processes, as XLA's own collectives need.

    The client is started where only it can tell.
    """
    return _may_span() and (spmd() or (bool(_devices()) and bool(_everyone)))


def devices_of_job() -> tuple[jax.Device, ...]:
    """The devices of all processes, by rank, where programs span them; else none."""
    return _everyone


def local_index(array: jax.Array) -> int:
    """Index of the xla device that has an array of one device."""
    (device,) = array.devices()
    return _devices().index(device)


def _meet(address: str, processes: int, rank: int) -> None:
    global _processes
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM to itself
    # Of several GPUs this process has one, without SPMD; JAX chooses among no other devices.
    several = _platform() in ("cuda", "rocm") and device_count() > 1
    jax.distributed.initialize(
        address,
        processes,
        rank,
        local_device_ids=[_config.LOCAL_RANK.get()] if several else None,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,  # JAX's default is every address of the host
        shutdown_timeout_seconds=_LONG,  # who is done waits quietly
    )
    _processes = processes


def is_connected() -> bool:
    """Whether JAX connects the processes of the job, and aborts the others when that of rank 0 is gone."""
    return _processes > 0


def leave_job() -> None:
    """Makes JAX not wait for the other processes at exit: they know of the failure, and may never come."""
    if not _processes:
        return
    from torch_xla._jax_internals import job_state as state

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(state.client))  # to destroy it would be to wait
    if state.service is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state.service))
    state.client = state.service = None


def _note_fork() -> None:
    global _forked
    _forked = True


def at_exit(end: Callable[[], None]) -> None:
    """Registers a function to call at exit in a process that started the client, while the client exists."""
    _ends.append(end)


def _finish_at_exit() -> None:
    background.end()
    for end in [] if _forked else _ends:
        end()


def _check_process() -> None:
    if _forked:
        raise RuntimeError(
            "[device] this process was forked after the xla client had started and cannot use it; start the child with "
            "the 'spawn' method, or create the first xla tensor after the fork"
        )


def jax_device(index: int) -> jax.Device:
    """The PJRT device behind ``xla:index``; RuntimeError where there is none, or the client cannot be started here."""
    _check_process()
    devices = _devices()[: 1 if spmd() else None]
    if not 0 <= index < len(devices):
        raise RuntimeError(f"[device] got xla:{index}, available are xla:0 to xla:{len(devices) - 1}")
    return devices[index]


def hardware_devices() -> tuple[jax.Device, ...]:
    """The PJRT devices of this process; RuntimeError where the client cannot be started here."""
    _check_process()
    return _devices()


def hardware(index: int) -> str:
    """Name of a device's hardware, such as ``"CPU:0"``."""
    return f"{device_type()}:{index}"


def memory_stats(index: int) -> dict[str, int] | None:
    """The client's memory statistics in bytes, or None where it keeps none (CPU, some plugins)."""
    device = jax_device(index)
    if described.topology() is not None:
        return shapes.memory_stats(device)
    try:
        return device.memory_stats()
    except Exception:  # a plugin's own
        return None


def x64() -> AbstractContextManager[Any]:
    """A scope in which JAX keeps 64-bit types; outside it the user's own JAX code is not changed."""
    import jax

    return jax.enable_x64(True)
