"""Compiling: StableHLO becomes an executable of the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch_xla import _bindings, _metrics
from torch_xla._core import backend, lowering
from torch_xla._core.graph import Graph

# XLA:CPU drops barriers half-way through its passes, and then merges what they kept apart.
_DISABLED, _EXPANDER = "xla_disable_hlo_passes", "cse_barrier_expander"

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
        numbers: Per packed vector of numbers, the bytes of the latest run and their buffer.
    """

    run: Any
    loaded: Any
    waits: bool = False
    keep: Any = None
    packing: _bindings.Packing | None = None
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
    """The options of one compile: the user's, and on a CPU one that lets barriers hold."""
    if backend.jax_device(graph.device).platform != "cpu":
        return _options
    return {**_options, _DISABLED: ",".join([*filter(None, [_options.get(_DISABLED)]), _EXPANDER])}


def compile_graph(graph: Graph, name: str) -> Executable:
    """Lowers and compiles a graph.

    Raises:
        StaticNumbers: An operator must be recorded with its numbers as constants.
        RuntimeError: Lowering or compiling failed.
    """
    lowered = lowering.lower(graph, name)
    if lowered.has_callback and graph.donated:
        # A callback can fail half-way through a run; the inputs must then still be there.
        lowered = lowering.lower(replace(graph, donated=()), name)
    with _metrics.timed(_metrics.stage("CompileTime")), backend.x64():
        compiled = lowered.stage.compile(compiler_options=_options_for(graph) or None)
    _metrics.add_sample("InputOutputAliasCount", 0 if lowered.has_callback else len(graph.donated), "count")
    loaded: Any = compiled.runtime_executable()
    return Executable(loaded.execute_sharded, loaded, waits=lowered.has_callback, keep=compiled)
