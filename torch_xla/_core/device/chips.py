"""What is known of TPU chips: memory, peaks and bandwidths, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_xla._errors import message

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One kind of chip, as a program sees it: figures are of one of its devices, of which a v7x has two a chip."""

    name: str  # as in a topology's name, ``"v5e"``
    compiler_name: str  # as package libtpu calls it in a topology's name
    dimensions: int  # how many a topology of it has
    memory: float  # bytes that programs may use; the compiler of libtpu 0.0.42 says so when one needs more
    peak: float  # floating-point operations a second in products of bfloat16
    peak_int8: float  # operations a second in products of int8; 0 where the source does not say
    bandwidth: float  # bytes a second from and to its memory
    links: float  # bytes a second to its neighbours, of all links together, in both directions
    source: str  # the page that has the peaks and bandwidths, and others for what it lacks
    options: tuple[tuple[str, Any], ...] = ()  # what libtpu has to be told, to describe slices as they are lent


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_V4_LINKS = ", links: https://arxiv.org/abs/2304.01433"  # six of 50 GB/s each way
_MEGACORE = (("chip_config_name", "megacore"),)
CHIPS = (
    Chip("v4", "v4", 3, 30.75 * GIB, 275e12, 275e12, 1200e9, 600e9, _DOCS + "v4" + _V4_LINKS, _MEGACORE),
    Chip("v5e", "v5e", 2, 15.75 * GIB, 197e12, 393e12, 819e9, 400e9, _DOCS + "v5e"),
    Chip("v5p", "v5p", 3, 95.74 * GIB, 459e12, 0, 2765e9, 1200e9, _DOCS + "v5p"),
    Chip("v6e", "v6e", 2, 31.25 * GIB, 918e12, 1836e12, 1638e9, 800e9, _DOCS + "v6e"),
    Chip("v7x", "tpu7x", 3, 94.75 * GIB, 1153.5e12, 0, 3690e9, 600e9, _DOCS + "tpu7x"),
)


def find(topology: str) -> Chip:
    """The chip of a topology, such as ``"v5e:8x8"``; ValueError where there is none of that name."""
    name = topology.partition(":")[0].lower()
    for chip in CHIPS:
        if name in (chip.name, chip.compiler_name):
            return chip
    expected = f"a chip ({', '.join(chip.name for chip in CHIPS)}) and its numbers, such as v5e:4x4 or v5p:2x2x2"
    do = "python -m torch_xla.ahead --topologies lists them"
    raise ValueError(message("ahead", f"got topology {topology!r}", expected=expected, do=do))
