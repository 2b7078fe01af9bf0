"""Devices of a topology that is not here; `shapes` are the buffers on them.

``XLA_AHEAD=v5e:8x8`` asks for them. Programs are recorded and compiled as for chips, by the compiler in package libtpu,
and nothing is computed: a run gives the shapes of its results, and what is read is zero.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import signal
import threading
from importlib.metadata import requires, version
from typing import TYPE_CHECKING, Any

from torch_xla import _config
from torch_xla._core.device import chips
from torch_xla._errors import message, one_line

if TYPE_CHECKING:
    import jax

_CPU = "cpu"  # JAX's own CPU devices, described: where there is no libtpu
# The compiler would look for the machine's chips, and for others that use them.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_LOG_DIR": "disabled",
}


def topology() -> str | None:
    """Name of the topology that programs are compiled for, instead of running on devices; None where they run."""
    asked = _config.XLA_AHEAD.get()
    return asked.split()[0] if asked else None


def platform() -> str:
    """JAX's name of the kind of the described devices."""
    return platform_of(topology() or "")


def platform_of(name: str) -> str:
    """JAX's name of the kind of a topology's devices."""
    return _CPU if name.startswith(f"{_CPU}:") else "tpu"


@functools.cache
def devices() -> tuple[jax.Device, ...]:
    """All devices of the topology, host by host; ValueError where there is no such one, RuntimeError without libtpu."""
    name = topology() or ""
    if platform() == _CPU:
        return _cpu_devices(name)
    chip = chips.find(name)
    layout = re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", name.partition(":")[2])
    if layout is None or layout[0].count("x") + 1 != chip.dimensions:
        shape = "x".join("2" for _ in range(chip.dimensions))
        expected = f"{chip.dimensions} numbers, as in {chip.name}:{shape}"
        raise ValueError(message("ahead", f"got topology {name!r}", expected=expected))
    _check_compiler()
    options = dict(chip.options)
    if set(layout[0]) <= set("1x"):  # a chip by itself, which libtpu takes for a part of a host
        options["chips_per_host_bounds"] = (1, 1, 1)
    import jax
    from jax.experimental import topologies

    # Its timers send SIGPROF, for which it has a handler. Lightning restores what Python knows of: the process's end.
    if signal.getsignal(signal.SIGPROF) == signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
    _keep_to_cpu()
    jax.devices(_CPU)  # has read XLA_FLAGS then, which the other compiler does not know and ends the process for
    try:
        with _config.variables_kept(*_ALONE, "XLA_FLAGS"):
            os.environ.update(_ALONE)
            os.environ.pop("XLA_FLAGS", None)
            described = topologies.get_topology_desc(f"{chip.compiler_name}:{layout[0]}", platform="tpu", **options)
    except Exception as error:  # a plugin's own
        problem = f"got topology {name!r}, which libtpu does not know ({one_line(error)})"
        do = f"take another, such as {chip.name}:{'x'.join('4' * chip.dimensions)}"
        expected = "a shape of whole hosts, of 2 x 2 chips each"
        raise ValueError(message("ahead", problem, expected=expected, do=do)) from error
    return tuple(sorted(described.devices, key=lambda device: (device.process_index, device.id)))


def _cpu_devices(name: str) -> tuple[jax.Device, ...]:
    import jax

    count = name.partition(":")[2]
    if not count.isdigit() or not 1 <= int(count) <= 128:
        raise ValueError(message("ahead", f"got topology {name!r}", expected="a number of devices, as in cpu:8"))
    _keep_to_cpu()
    settings: Any = jax.config
    if settings.jax_num_cpu_devices != int(count):
        jax.config.update("jax_num_cpu_devices", int(count))
    return tuple(jax.local_devices(backend=_CPU))[: int(count)]


def _keep_to_cpu() -> None:
    import jax

    settings: Any = jax.config
    if not settings.jax_platforms:
        jax.config.update("jax_platforms", _CPU)  # libtpu would look for chips


def wanted_compiler() -> str:
    """The package with the compiler for TPUs, in the version that belongs to JAX: ``"libtpu==0.0.42.*"``."""
    named = (each for each in requires("jax") or () if each.startswith("libtpu"))
    wanted = next((each for each in named if "tpu" in each.partition(";")[2]), "libtpu")
    return wanted.partition(";")[0].replace(" ", "")


def _check_compiler() -> None:
    fits = wanted_compiler()
    do = f"pip install '{fits}', or torch_xla with extra [tpu]"
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(message("ahead", "found no package libtpu, which has the compiler for TPUs", do=do))
    prefix = fits.partition("==")[2].removesuffix("*")
    if prefix and not f"{version('libtpu')}.".startswith(prefix):
        problem = f"got libtpu {version('libtpu')} beside JAX {version('jax')}"
        raise RuntimeError(message("ahead", problem, expected=fits, do=do))


def hosts() -> int:
    """How many hosts the topology has."""
    return len({device.process_index for device in devices()})


def local_devices(rank: int, world: int, spmd: bool) -> tuple[tuple[jax.Device, ...], tuple[jax.Device, ...]]:
    """The devices of one of a job's processes, and those of all, by rank; of a process alone its host's and none.

    With `spmd` a process has all devices of a host, else one. ValueError where there are not so many.
    """
    every = devices()
    if spmd and world > 1:
        if world != hosts():
            expected = f"{hosts()}, the hosts of {topology()}"
            raise ValueError(message("ahead", f"got {world} processes with SPMD", expected=expected))
        return tuple(device for device in every if device.process_index == rank), every
    if spmd:
        return every, ()
    if world > len(every):
        problem, do = f"got a job of {world} processes", "take a larger topology, or --world"
        expected = f"at most {len(every)}, the devices of {topology()}"
        raise ValueError(message("ahead", problem, expected=expected, do=do))
    if world > 1:
        return every[rank : rank + 1], every[:world]
    return tuple(device for device in every if device.process_index == every[0].process_index), ()


def memory() -> int:
    """Bytes that programs may use of a device."""
    return int(chips.find(topology() or "").memory) if platform() != _CPU else 0
