"""Splits: how a buffer is spread over the devices of a mesh. Each has a number, by which the recorder knows it.

All splits are told over one mesh, whose axes have prime lengths: whichever meshes a caller uses, XLA then sees axes of
one mesh in a program, and a split that it chose itself is known again. Only devices in an order that is no
transposition of that mesh get a mesh of their own.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_xla._errors import message

if TYPE_CHECKING:
    import jax

# Numbers that csrc/ir/node.h knows too: whole on every device as all that nobody asked about, wherever the program has
# it, and whole because XLA chose that or somebody asked for it.
WHOLE, ANYWHERE, KNOWN_WHOLE = 0, 1, 2
PARTS = 3  # manual sharding: the tensor is one device's part, the buffer has all parts, the devices its first dimension
_FIRST = 16


@dataclass(frozen=True)
class Split:
    """How a buffer is spread."""

    tiles: tuple[int, ...]  # in how many parts each dimension is
    order: tuple[int, ...]  # the devices, by part in row-major order; those with copies of one part stand together

    @property
    def copies(self) -> int:
        """How many devices have the same part."""
        return len(self.order) // math.prod(self.tiles)

    @property
    def whole(self) -> bool:
        """Whether each device has all of it."""
        return math.prod(self.tiles) == 1

    def __str__(self) -> str:
        """The split in XLA's notation."""
        if self.whole:
            return "{replicated}"
        dims = [*self.tiles, self.copies] if self.copies > 1 else self.tiles
        kind = " last_tile_dim_replicate" if self.copies > 1 else ""
        return f"{{devices=[{','.join(map(str, dims))}]{','.join(map(str, self.order))}{kind}}}"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the dimensions divide."""
        return all(size % tiles == 0 for size, tiles in zip(shape, self.tiles, strict=True))

    def held(self, shape: Sequence[int]) -> Split:
        """What of it a buffer of a shape has: JAX has none in parts of different sizes."""
        if self.fits(shape):
            return self
        keep = [size % tiles == 0 for size, tiles in zip(shape, self.tiles, strict=True)]
        return _without(self, tuple(keep))

    def indices(self, shape: Sequence[int]) -> list[tuple[int, tuple[slice, ...], int]]:
        """Per part on a device: the device, what of a shape it has, and which of the copies this is; in their order.

        Parts are of equal size but for the last ones, which may have less, or nothing.
        """
        entries = []
        for at, device in enumerate(self.order):
            tile, copy = divmod(at, self.copies)
            entries.append((device, _slices(tile, self.tiles, shape), copy))
        return sorted(entries)


def _slices(tile: int, tiles: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    slices = []
    for size, count in zip(reversed(shape), reversed(tiles), strict=True):
        tile, place = divmod(tile, count)
        length = -(-size // count)
        slices.append(slice(min(place * length, size), min((place + 1) * length, size), 1))
    return tuple(reversed(slices))


def split(tiles: Sequence[int], order: Sequence[int]) -> Split:
    """The split in its one form: copies of a part are in ascending order."""
    copies = len(order) // math.prod(tiles)
    grouped = [sorted(order[i : i + copies]) for i in range(0, len(order), copies)]
    return Split(tuple(tiles), tuple(device for group in grouped for device in group))


@functools.lru_cache(maxsize=4096)
def _without(whole: Split, keep: tuple[bool, ...]) -> Split:
    import numpy as np

    devices = np.array(whole.order).reshape(*whole.tiles, whole.copies)
    kept = [i for i, kept in enumerate(keep) if kept]
    dropped = [i for i, kept in enumerate(keep) if not kept]
    moved = devices.transpose(*kept, *dropped, len(keep)).reshape(-1)
    return split([tiles if kept else 1 for tiles, kept in zip(whole.tiles, keep, strict=True)], moved.tolist())


_by_number: dict[int, Split] = {}


@functools.lru_cache(maxsize=4096)
def number_of(wanted: Split) -> int:
    """The number by which the recorder knows a split; the same in every process."""
    if wanted.whole:
        return KNOWN_WHOLE
    digest = hashlib.blake2b(str(wanted).encode(), digest_size=4).digest()
    number = max(int.from_bytes(digest, "little") >> 1, _FIRST)
    while _by_number.setdefault(number, wanted) != wanted:
        number += 1
    return number


def by_number(number: int) -> Split | None:
    """The split with a number; None where all devices have all of it."""
    return _by_number[number] if number >= _FIRST else None


def same(one: int, other: int) -> bool:
    """Whether buffers with these numbers are split alike for sure."""
    wholes = (WHOLE, KNOWN_WHOLE)
    return (one == other and one != ANYWHERE) or (one in wholes and other in wholes)


def text_of(number: int) -> str:
    """A placement in XLA's notation, empty where nothing is known of it."""
    if number in (WHOLE, ANYWHERE):
        return ""
    if number == PARTS:
        return "{manual}"
    tiling = by_number(number)
    return "{replicated}" if tiling is None else str(tiling)


def of_xla(proto: Any, rank: int) -> int:
    """The number of a split that XLA chose, in the form that an executable has of it, of what has `rank` dimensions."""
    from torch_xla._jax_internals import xla_client

    # From JAX 0.11 on a plugin's client may name the axes of a mesh, and has no tiles then.
    hlo_sharding = xla_client.HloSharding.from_proto(proto).v3_to_v2_sharding()
    if not hlo_sharding.is_tiled():
        return KNOWN_WHOLE
    if any(kind != xla_client.OpSharding.Type.REPLICATED for kind in hlo_sharding.subgroup_types()):
        raise RuntimeError(message("spmd", f"XLA gives a result as {hlo_sharding}", do="report it"))
    tiles = list(hlo_sharding.tile_assignment_dimensions())[:rank]
    chosen = split(tiles, list(hlo_sharding.tile_assignment_devices()))
    return KNOWN_WHOLE if chosen.whole else number_of(chosen)


def _factors(count: int) -> list[int]:
    factors, divisor = [], 2
    while count > 1:
        while count % divisor == 0:
            factors.append(divisor)
            count //= divisor
        divisor += 1
    return factors


@functools.lru_cache(maxsize=4096)
def axes_of(wanted: Split) -> tuple[tuple[int, ...], ...] | None:
    """The axes of the mesh of prime lengths that each dimension is split over; None where there are none such."""
    import numpy as np

    primes = _factors(len(wanted.order))
    strides = [math.prod(primes[i + 1 :]) for i in range(len(primes))]
    axes: list[int] = []
    step = 1
    while step < len(wanted.order):  # from the axis that changes fastest
        stride = wanted.order[step] - wanted.order[0]
        if stride not in strides or strides.index(stride) in axes:
            return None
        axes.insert(0, strides.index(stride))
        step *= primes[axes[0]]
    if not np.array_equal(np.arange(len(wanted.order)).reshape(primes).transpose(axes).reshape(-1), wanted.order):
        return None
    mesh_axes: list[tuple[int, ...]] = []
    for tiles in wanted.tiles:
        dimension_axes: list[int] = []
        while math.prod(primes[axis] for axis in dimension_axes) < tiles:
            dimension_axes.append(axes.pop(0))
        if math.prod(primes[axis] for axis in dimension_axes) != tiles:
            return None
        mesh_axes.append(tuple(dimension_axes))
    return tuple(mesh_axes)


def all_parts(devices: tuple[jax.Device, ...]) -> jax.sharding.NamedSharding:
    """JAX's form of an array whose first dimension is the devices."""
    import jax

    mesh = _sharding(None, devices).mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))


def sharding(wanted: Split | None, devices: tuple[jax.Device, ...]) -> jax.sharding.NamedSharding:
    """JAX's form of a split; None is that of what is whole."""
    return _sharding(wanted, devices)


@functools.lru_cache(maxsize=4096)
def _sharding(wanted: Split | None, devices: tuple[jax.Device, ...]) -> Any:
    import jax
    import numpy as np

    array = np.array(devices, dtype=object)
    axes = () if wanted is None else axes_of(wanted)
    if axes is not None:
        primes = _factors(len(devices)) or [1]
        names = [f"m{i}" for i in range(len(primes))]
        mesh = jax.sharding.Mesh(array.reshape(primes), names)
        spec = [tuple(names[axis] for axis in dimension_axes) or None for dimension_axes in axes]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    assert wanted is not None
    shape = [*wanted.tiles, wanted.copies]
    names = [f"d{i}" for i in range(len(shape))]
    mesh = jax.sharding.Mesh(array.reshape(shape), names)
    parts = [name if tiles > 1 else None for name, tiles in zip(names[:-1], wanted.tiles, strict=True)]
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts), _logical_device_ids=wanted.order)
