"""Placements: where the buffers of an xla device are, and what its programs span.

Nothing else asks which: whoever puts a buffer somewhere, lowers, compiles or starts a program asks the placement.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
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


def of(index: int) -> Placement:
    """The placement of ``xla:index``: one device, one replica, one partition.

    Raises:
        RuntimeError: There is no such device, or the client cannot be started here.
    """
    return _alone(client.jax_device(index))  # which looks each time whether this process may use it


@functools.cache
def _alone(device: jax.Device) -> Placement:
    import jax

    return Placement((device,), (device,), jax.sharding.SingleDeviceSharding(device))


def index_of(buffer: jax.Array) -> int:
    """Index of the xla device that a buffer belongs to."""
    devices = buffer.devices()
    return next(index for index in range(client.device_count()) if devices.issuperset(of(index).local))
