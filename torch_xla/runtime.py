"""The runtime's devices and processes, imported as ``xr``.

Counts and kinds come from the environment and the drivers where that is possible: asking does not start a client.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch_xla._core.device import client, pjrt_plugins
from torch_xla._core.execute import parts
from torch_xla._core.job import session
from torch_xla._deprecation import warn_once
from torch_xla._errors import message

runtime = sys.modules[__name__]  # a name of the original


def set_device_type(pjrt_device: str) -> None:
    """Chooses the kind of device, before any is used.

    Args:
        pjrt_device: ``"CPU"``, ``"CUDA"``, ``"TPU"`` or the name of an installed plugin.

    Raises:
        RuntimeError: devices of another kind are in use.
        ValueError: there is no such kind; the message lists what is available.
    """
    if client.client_started() and client.device_type() != pjrt_device:
        raise RuntimeError(
            message(
                "runtime",
                f"Can't change device type after XLA runtime is initialized: it runs on {client.device_type()}",
                do=f"call set_device_type({pjrt_device!r}) before the first xla tensor, or set PJRT_DEVICE",
            )
        )
    client.set_device_type(pjrt_device)


def device_type() -> str:
    """Kind of device in use or to be used: ``"CPU"``, ``"CUDA"``, ``"TPU"`` or the name of a plugin."""
    return client.device_type()


def is_bf16_supported() -> bool:
    """Whether tensors of `torch.bfloat16` can be made; XLA supports them on every backend."""
    return True


def local_process_count() -> int:
    """Number of processes of the job on this host."""
    return session.rank_info().local_world


def global_device_count() -> int:
    """Number of xla devices of all processes; with SPMD they have one together."""
    return world_size() * client.device_count()


def world_size() -> int:
    """Number of processes that work on data of their own: with SPMD all of the job are one."""
    return 1 if client.spmd() else session.rank_info().world


def local_device_count() -> int:
    """Number of devices of all processes on this host."""
    return local_process_count() * addressable_device_count()


def addressable_device_count() -> int:
    """Number of devices of this process."""
    return client.device_count()


def global_ordinal() -> int:
    """Ordinal of this process in the job, whichever of its devices is the current one; with SPMD all are one."""
    return 0 if client.spmd() else session.rank_info().rank


def local_ordinal() -> int:
    """Ordinal of this process on its host, whichever of its devices is the current one."""
    return session.rank_info().local_rank


def process_index() -> int:
    """Index of this process in the job."""
    return session.rank_info().rank


def process_count() -> int:
    """Number of processes of the job."""
    return session.rank_info().world


def host_index() -> int:
    """Index of this host in the job."""
    plugin = pjrt_plugins.find(client.device_type())
    return session.rank_info().host if plugin is None else plugin.host_index()


def using_pjrt() -> bool:
    """Always True; an older question."""
    warn_once("torch_xla.runtime.using_pjrt", "nothing: there is no other runtime")
    return True


def runtime_device_attributes(device: str) -> dict[str, object]:
    """Attributes of a device, from the runtime.

    Args:
        device: ``"xla:0"`` or a hardware name such as ``"CPU:0"``.

    Returns:
        At least ``name``; on TPU also ``coords`` and ``core_on_chip``. What else the device's PJRT plugin tells is
        there when it is asked for by its name.
    """
    try:
        index = int(device.rsplit(":", 1)[1])
    except (IndexError, ValueError):
        raise ValueError(message("runtime", f"got device {device!r}", expected="a name such as 'xla:0'")) from None
    devices = _hardware()
    if not 0 <= index < len(devices):
        raise ValueError(message("runtime", f"got device {device!r}", expected=f"an index below {len(devices)}"))
    return _Attributes(devices[index], index)


def _hardware() -> tuple[Any, ...]:
    """The devices that this process knows by number: with SPMD those of all processes."""
    local_devices = client.hardware_devices()
    return (client.devices_of_job() if client.spmd() else ()) or local_devices


class _Attributes(dict[str, object]):
    """Attributes of a device; one of its plugin's own is asked for by name, as JAX does not list them."""

    def __init__(self, device: Any, index: int) -> None:
        super().__init__(name=client.hardware(index))
        self._device = device
        for name in ("coords", "core_on_chip", "slice_index", "device_kind"):
            self.get(name)

    def __missing__(self, name: str) -> object:
        value = getattr(self._device, name, None) if isinstance(name, str) and not name.startswith("_") else None
        if value is None or callable(value):
            raise KeyError(name)
        self[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None  # type: ignore[arg-type]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def global_runtime_device_attributes() -> list[dict[str, object]]:
    """`runtime_device_attributes` of all devices."""
    return [runtime_device_attributes(f"xla:{index}") for index in range(len(_hardware()))]


def global_runtime_device_count() -> int:
    """Number of hardware devices of all processes."""
    return session.rank_info().world * client.hardware_count()


def addressable_runtime_device_count() -> int:
    """Number of hardware devices of this process."""
    return client.hardware_count()


def use_spmd(auto: bool | None = False) -> None:
    """Turns SPMD mode on: all devices of the job are one xla device, over which tensors may be split.

    Tensors that there are already are copied to all of them, with a warning.

    Args:
        auto: Whether XLA chooses how parameters are split; not in this version.

    Raises:
        RuntimeError: There are tensors on other devices than ``xla:0``, or in a job of several processes.
        NotImplementedError: `auto` is asked for.
    """
    if auto:
        raise NotImplementedError(
            message(
                "spmd",
                "got auto=True, and XLA's search for shardings is not built in",
                do="call mark_sharding on the parameters",
            )
        )
    if parts.use_mesh():
        warnings.warn(
            "[spmd] xla tensors were made before SPMD mode; each device has a copy now. Call "
            "torch_xla.runtime.use_spmd() before the first of them to save that",
            stacklevel=2,
        )


def is_spmd() -> bool:
    """Whether SPMD mode is on, which ``XLA_USE_SPMD=1`` asks for too."""
    return client.spmd()


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keeps compiled graphs in a folder, so that later runs need not compile them.

    Args:
        path: The folder; it is made if it does not exist.
        readonly: Whether to only read it.
    """
    from torch_xla._core.compile import cache

    cache.initialize(path, readonly)


def get_num_cached_compilation_graph() -> int:
    """Number of compiled graphs in memory."""
    from torch_xla._core.compile import cache

    return cache.num_graphs()


def clear_computation_cache() -> None:
    """Forgets the compiled graphs in memory; those on disk stay."""
    from torch_xla._core.compile import cache

    cache.clear()


def get_master_ip() -> str:
    """Address of the job's first process."""
    return session.rank_info().address or "127.0.0.1"
