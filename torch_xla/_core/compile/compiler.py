"""Compiling: StableHLO becomes an executable of the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from torch_xla import _bindings, _metrics
from torch_xla._core.compile import interruptible
from torch_xla._core.compile.dispatch import starter
from torch_xla._core.device import client, placement
from torch_xla._core.graph.graph import Graph
from torch_xla._core.lower import lowering
from torch_xla.ops.registry import Meta

# XLA:CPU drops barriers half-way through its passes, and then merges what they kept apart.
_DISABLED, _EXPANDER = "xla_disable_hlo_passes", "cse_barrier_expander"
# It also keeps half types in float32 between two operators, which PyTorch's CPU kernels round.
_EXCESS = "xla_allow_excess_precision"

# The user's XLA options, sorted; a part of what a program is, which every barrier asks for.
passed_options: tuple[tuple[str, str | bool | int | float], ...] = ()


@dataclass
class Executable:
    """A compiled graph.

    Attributes:
        loaded: XLA's executable.
        program: What the recorder knows of it, to run it.
        keep: Whatever must live as long as the executable.
    """

    loaded: Any
    program: _bindings.Program
    keep: Any = None


def executable(loaded: Any, cut: _bindings.Graph, waits: bool = False, keep: Any = None) -> Executable:
    """What XLA compiled a cut graph to, ready to run."""
    program = _bindings.Program(cut, waits)
    results = [*(Meta(*meta) for meta in program.packing.result_metas(cut)), Meta((), torch.bool)]  # with the token
    program.starter = functools.partial(starter, loaded, results, cut.device)
    return Executable(loaded, program, keep)


def set_options(options: dict[str, str | bool | int | float]) -> None:
    """Replaces the XLA options passed with every compile.

    Args:
        options: Names and values of XLA debug options.
    """
    global passed_options
    passed_options = tuple(sorted(options.items()))


def options() -> dict[str, str | bool | int | float]:
    """The XLA options passed with every compile."""
    return dict(passed_options)


def _options_for(device: int) -> dict[str, Any]:
    """The options of one compile: the user's, and on a CPU those that let barriers hold and round as PyTorch does."""
    own = dict(passed_options)
    if placement.of(device).platform != "cpu":
        return own
    disabled = ",".join([*filter(None, [str(own.get(_DISABLED, ""))]), _EXPANDER])
    return {_EXCESS: False, **own, _DISABLED: disabled}


def lower(graph: Graph, name: str) -> lowering.Lowered:
    """Lowers a graph for `compile_lowered`.

    Raises:
        StaticNumbers: An operator must be recorded with its numbers as constants.
        LoweringError: A node could not be lowered.
    """
    lowered = lowering.lower(graph, name, to_run=True)
    if lowered.has_callback and graph.donated:
        # A callback can fail half-way through a run; the inputs must then still be there.
        lowered = lowering.lower(replace(graph, donated=(), successors=()), name, to_run=True)
    return lowered


def compile_lowered(cut: _bindings.Graph, lowered: lowering.Lowered, name: str) -> Executable:
    """Compiles a lowered graph.

    Args:
        cut: The graph as the recorder knows it.
        lowered: What `lower` gave for its description.
        name: What it is called on a terminal.

    Raises:
        RuntimeError: Compiling failed.
    """

    def compile() -> jax.stages.Compiled:
        with client.x64():
            return lowered.stage.compile(compiler_options=_options_for(cut.device) or None)

    stage = _metrics.stage("CompileTime")
    _metrics.count("CreateCompileHandles")
    count = _metrics.counter("UncachedCompile") or 0
    with _metrics.timed(stage):
        compiled = interruptible.call(compile, f"compiling {name}: {cut.num_nodes} operators, graph {count + 1}")
    _metrics.add_sample("InputOutputAliasCount", 0 if lowered.has_callback else len(cut.donated), "count")
    return executable(compiled.runtime_executable(), cut, waits=lowered.has_callback, keep=compiled)
