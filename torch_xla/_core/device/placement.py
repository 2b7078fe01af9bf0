"""Says where the buffers of an xla device are and which devices its programs span: `placement.of(0).devices`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_xla._core.device import client, pjrt_plugins, shardings

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class DeviceSet:
    """The devices and the sharding of an xla device's buffers."""

    devices: tuple[jax.Device, ...]  # those that a program spans, in the order of its replicas and partitions
    local: tuple[jax.Device, ...]  # those of them that belong to this process; a buffer has one part on each
    sharding: jax.sharding.Sharding  # of a buffer whose leaf has placement number 0
    mesh: bool = False  # whether buffers may be split over the devices, and programs are partitioned

    @property
    def platform(self) -> str:
        """Kind of its devices, as JAX calls it: ``"cpu"``, ``"cuda"``, ``"tpu"``."""
        return self.local[0].platform

    @property
    def hardware(self) -> str:
        """Model of its devices: ``"NVIDIA H100 80GB HBM3"``."""
        return self.local[0].device_kind

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether it is this process's memory, and its programs may call what this process registers with JAX.

        It is one device of JAX's own CPU client then: a plugin's may call itself a CPU just as well, and on a mesh each
        would compute the whole.
        """
        return client.is_own_cpu() and not self.mesh

    @property
    def spans_job(self) -> bool:
        """Whether its programs have a replica in each process of a job."""
        return len(self.devices) > len(self.local) and not self.mesh

    @property
    def target(self) -> str:
        """All of the devices that a compiled program depends on."""
        features = _cpu_features() if self.platform == "cpu" else ""
        kind = "mesh" if self.mesh else ""
        version = f"{self.local[0].client.platform_version} {pjrt_plugins.identity(client.device_type())}"
        return f"{client.device_type()} {self.platform} {version} {self.hardware} {len(self.devices)} {kind} {features}"

    def at(self, number: int, shape: Sequence[int]) -> jax.sharding.Sharding:
        """The sharding of a buffer of a shape, by the placement number of its leaf."""
        if number == shardings.MANUAL:
            return shardings.manual_sharding(self.devices)
        split = shardings.by_number(number)
        return self.sharding if split is None else shardings.sharding(split.on_buffer(shape), self.devices)

    def buffer_shape(self, number: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the buffer of a tensor."""
        return (len(self.devices), *shape) if number == shardings.MANUAL else tuple(shape)

    def in_module(self, number: int, shape: Sequence[int]) -> jax.sharding.Sharding | None:
        """The sharding of a buffer in a module; None where the compiler chooses."""
        import jax

        if not self.mesh:  # the module is that of one device; how many run it is said when it is compiled
            return jax.sharding.SingleDeviceSharding(self.local[0])
        if number == shardings.UNSPECIFIED:
            return None
        replicated = number != shardings.MANUAL and shardings.by_number(number) is None
        return shardings.sharding(None, self.devices) if replicated else self.at(number, shape)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # of few placements; a batch is put at each step
    def parts(self, number: int, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], ...]:
        """The slices of a shape that each local device has."""
        split = shardings.by_number(number)
        if split is None:
            return ((...,),) * len(self.local)  # type: ignore[return-value]
        local = {self.devices.index(device) for device in self.local}
        return tuple(where for device, where, _ in split.on_buffer(shape).indices(shape) if device in local)


def of(index: int) -> DeviceSet:
    """The placement of ``xla:index``: one replica, or one per process of a job whose programs span its devices.

    Raises RuntimeError where there is no such device, or the client cannot be started here.
    """
    return _of(client.jax_device(index), client.spmd())  # which looks each time whether this process may use it


@functools.cache
def _of(device: jax.Device, spmd: bool) -> DeviceSet:
    import jax
    import numpy as np

    everyone = client.devices_of_job()
    if spmd:
        local = client.hardware_devices()
        return DeviceSet(everyone or local, local, shardings.sharding(None, everyone or local), mesh=True)
    if not everyone:
        return DeviceSet((device,), (device,), jax.sharding.SingleDeviceSharding(device))
    ranks = jax.sharding.Mesh(np.array(everyone), ("ranks",))
    # Each has values of its own; to JAX they are copies of one array.
    return DeviceSet(everyone, (device,), jax.sharding.NamedSharding(ranks, jax.sharding.PartitionSpec()))


def local_array(buffer: jax.Array) -> jax.Array:
    """A buffer as an array that JAX's functions take: of this process alone, where each has its own."""
    return buffer if buffer.is_fully_addressable or client.spmd() else buffer.addressable_data(0)


def global_array(part: jax.Array) -> jax.Array:
    """A buffer of an xla device made of `local_array`'s array, or of one computed from it."""
    import jax

    from torch_xla import _jax_internals

    everyone = client.devices_of_job()
    if not everyone or client.spmd():
        return part
    sharding = of(client.local_index(part)).sharding
    aval = jax.core.ShapedArray(part.shape, part.dtype)
    return _jax_internals.ArrayImpl(aval, sharding, [part], committed=True, _skip_checks=True)


def index_of(buffer: jax.Array) -> int:
    """Index of the xla device that a buffer belongs to."""
    devices = buffer.devices()
    return next(index for index in range(client.device_count()) if devices.issuperset(of(index).local))


@functools.cache
def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
