"""Compiling: StableHLO becomes an executable of the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax

from torch_xla import _bindings, _metrics
from torch_xla._core import backend, lowering, patience
from torch_xla._core.graph import Graph

# XLA:CPU drops barriers half-way through its passes, and then merges what they kept apart.
_DISABLED, _EXPANDER = "xla_disable_hlo_passes", "cse_barrier_expander"
# It also keeps half types in float32 between two operators, which PyTorch's CPU kernels round.
_EXCESS = "xla_allow_excess_precision"

_options: dict[str, Any] = {}


@dataclass
class Executable:
    """A compiled graph.

    Attributes:
        run: Takes the input buffers as a list, starts the program, returns the results' handle.
        loaded: XLA's executable.
        waits: Whether a run is waited for before its results count, because a host callback in it can fail.
        keep: Whatever must live as long as the executable.
        packing: Which of its buffers hold several leaves; known from its first run on.
        sharing: Which of the graph's numbers it takes as one.
        numbers: Per packed vector of numbers, the bytes of the latest run and their buffer.
    """

    run: Any
    loaded: Any
    waits: bool = False
    keep: Any = None
    packing: _bindings.Packing | None = None
    sharing: _bindings.Sharing | None = None
    numbers: dict[int, tuple[bytes, Any]] = field(default_factory=dict)


def set_options(options: dict[str, str | bool | int | float]) -> None:
    """Replaces the XLA options passed with every compile.

    Args:
        options: Names and values of XLA debug options.
    """
    _options.clear()
    _options.update(options)


def options() -> dict[str, str | bool | int | float]:
    """The XLA options passed with every compile."""
    return dict(_options)


def _options_for(graph: Graph) -> dict[str, Any]:
    """The options of one compile: the user's, and on a CPU those that let barriers hold and round as PyTorch does."""
    if backend.jax_device(graph.device).platform != "cpu":
        return _options
    disabled = ",".join([*filter(None, [_options.get(_DISABLED)]), _EXPANDER])
    return {_EXCESS: False, **_options, _DISABLED: disabled}


def lower(graph: Graph, name: str) -> lowering.Lowered:
    """Lowers a graph for `compile_lowered`.

    Raises:
        StaticNumbers: An operator must be recorded with its numbers as constants.
        LoweringError: A node could not be lowered.
    """
    lowered = lowering.lower(graph, name)
    if lowered.has_callback and graph.donated:
        # A callback can fail half-way through a run; the inputs must then still be there.
        lowered = lowering.lower(replace(graph, donated=(), successors=()), name)
    return lowered


def compile_lowered(graph: Graph, lowered: lowering.Lowered, name: str) -> Executable:
    """Compiles a lowered graph.

    Raises:
        RuntimeError: Compiling failed.
    """

    def compile() -> jax.stages.Compiled:
        with backend.x64():
            return lowered.stage.compile(compiler_options=_options_for(graph) or None)

    stage = _metrics.stage("CompileTime")
    _metrics.count("CreateCompileHandles")
    count = _metrics.counter("UncachedCompile") or 0
    with _metrics.timed(stage):
        compiled = patience.call(compile, f"compiling {name}: {len(graph.nodes)} operators, graph {count + 1}")
    _metrics.add_sample("InputOutputAliasCount", 0 if lowered.has_callback else len(graph.donated), "count")
    loaded: Any = compiled.runtime_executable()
    return Executable(loaded.execute_sharded, loaded, waits=lowered.has_callback, keep=compiled)
