"""Arrays that the partitioner splits alike, in a way that it chooses: Shardy's `sharding_group`."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from torch_xla._jax_internals import sdy
from torch_xla.ops.collective import primitive

_groups = itertools.count()


def _lower(ctx: Any, x: Any, y: Any) -> tuple[Any, Any]:
    group = next(_groups)
    sdy.sharding_group(x, group)
    sdy.sharding_group(y, group)
    return x, y


_shard_alike = primitive("shard_alike", lambda x, y: (x, y), _lower, several=True)


def shard_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both arrays, of as many dimensions: as soon as one is split the other is split in the same way."""
    first, second = _shard_alike.bind(x, y)
    return first, second
