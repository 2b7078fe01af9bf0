"""Placements: where the buffers of an xla device are, and what its programs span.

Nothing else asks which: whoever puts a buffer somewhere, lowers, compiles or starts a program asks the placement.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_xla._core.device import client

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Placement:
    """Where the buffers of an xla device are.

    Attributes:
        devices: Those that a program spans, in the order of its replicas and partitions.
        local: Those of them that belong to this process; a buffer has one part on each.
        sharding: Of a buffer whose leaf has placement number 0.
    """

    devices: tuple[jax.Device, ...]
    local: tuple[jax.Device, ...]
    sharding: jax.sharding.Sharding

    @property
    def platform(self) -> str:
        """Kind of its devices, as JAX calls it: ``"cpu"``, ``"cuda"``, ``"tpu"``."""
        return self.local[0].platform

    @property
    def hardware(self) -> str:
        """Model of its devices: ``"NVIDIA H100 80GB HBM3"``."""
        return self.local[0].device_kind

    @property
    def spans_job(self) -> bool:
        """Whether its programs have a replica in each process of a job."""
        return len(self.devices) > len(self.local)

    @property
    def target(self) -> str:
        """All of the devices that a compiled program depends on."""
        features = _cpu_features() if self.platform == "cpu" else ""
        return f"{self.platform} {self.hardware} {len(self.devices)} {features}"


def of(index: int) -> Placement:
    """The placement of ``xla:index``: one replica, or one per process of a job whose programs span its devices.

    Raises:
        RuntimeError: There is no such device, or the client cannot be started here.
    """
    return _of(client.jax_device(index))  # which looks each time whether this process may use it


@functools.cache
def _of(device: jax.Device) -> Placement:
    import jax
    import numpy as np

    everyone = client.devices_of_job()
    if not everyone:
        return Placement((device,), (device,), jax.sharding.SingleDeviceSharding(device))
    ranks = jax.sharding.Mesh(np.array(everyone), ("ranks",))
    # Each has values of its own; to JAX they are copies of one array.
    return Placement(everyone, (device,), jax.sharding.NamedSharding(ranks, jax.sharding.PartitionSpec()))


def own_part(buffer: jax.Array) -> jax.Array:
    """A buffer as an array of this process alone."""
    return buffer if buffer.is_fully_addressable else buffer.addressable_data(0)


def with_others(part: jax.Array) -> jax.Array:
    """An array of a local device as a buffer of its xla device."""
    import jax

    from torch_xla._core.device import jax_internals

    everyone = client.devices_of_job()
    if not everyone:
        return part
    sharding = of(client.local_index(part)).sharding
    aval = jax.core.ShapedArray(part.shape, part.dtype)
    return jax_internals.ArrayImpl(aval, sharding, [part], committed=True, _skip_checks=True)


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
