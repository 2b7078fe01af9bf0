"""Compiles StableHLO to an executable of the device: of a graph `x + 1`, one that takes and gives an array."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from torch_xla import _bindings, _events, _metrics
from torch_xla._core.compile import interruptible, options, result_places, shared
from torch_xla._core.compile.dispatch import starter
from torch_xla._core.device import buffers, client, placement
from torch_xla._core.graph.graph import Graph
from torch_xla._core.job import session
from torch_xla._core.lower import lowering
from torch_xla._errors import OptionsError, message, one_line
from torch_xla._jax_internals import compile_arguments, xla_client
from torch_xla.ops.fallback import NeedsHost
from torch_xla.ops.registry import Meta

# XLA:CPU drops barriers half-way through its passes, and then merges what they kept apart.
_DISABLED, _EXPANDER = "xla_disable_hlo_passes", "cse_barrier_expander"
# It makes a loop on a kilobyte one function, for which it has no barriers.
_AS_FUNCTION, _NO_BARRIER = "small-while-loop-hoisting", "Unhandled opcode for elemental IR emission: opt-barrier"
# XLA keeps half types in float32 between two operators, which PyTorch rounds, and drops what a program rounds itself.
_EXCESS = "xla_allow_excess_precision"
_LACKING = ("NOT_FOUND", "UNIMPLEMENTED")  # how an error begins where a client has not what a program wants


@dataclass
class Executable:
    """A compiled graph."""

    loaded: Any  # XLA's executable
    program: _bindings.Program  # what the recorder knows of it, to run it
    keep: Any = None  # whatever must live as long
    shared: bool = False  # whether another process of the job compiled it


def executable(
    loaded: Any, graph: _bindings.Graph, waits: bool = False, keep: Any = None, elsewhere: bool = False
) -> Executable:
    """Makes an `Executable` of what XLA compiled a cut graph to."""
    program = _bindings.Program(graph, waits)
    results = [
        *result_places.types(graph, program.packing),
        Meta((), torch.bool),
    ]  # with the token
    places = result_places.note(loaded, graph, program)
    program.starter = functools.partial(starter, loaded, results, graph.device, places)
    return Executable(loaded, program, keep, elsewhere)


def _options_for(device: int) -> dict[str, Any]:
    """The options of one compile: one that rounds as PyTorch does, on a CPU one that keeps barriers, and the user's."""
    own = {} if placement.of(device).platform != "cpu" else {_DISABLED: _EXPANDER}
    return {_EXCESS: False, **own, **dict(options.custom())}


def lower(graph: Graph, name: str) -> lowering.Lowered:
    """Lowers a graph for `compile_lowered`; raises as `lowering.lower` does."""
    lowered = lowering.lower(graph, name, to_run=True)
    if lowered.has_callback and not client.has_callbacks():
        raise NeedsHost("a function of JAX's", "it calls back into Python")
    if lowered.has_callback and graph.donated:
        # A callback can fail half-way through a run; the inputs must then still be there.
        lowered = lowering.lower(replace(graph, donated=(), aliased_outputs=()), name, to_run=True)
    return lowered


def compile_lowered(graph: _bindings.Graph, lowered: lowering.Lowered, name: str) -> Executable:
    """Compiles a lowered graph; the name is what it is called on a terminal.

    Raises NeedsHost where it calls what a plugin has not, RuntimeError where compiling failed, an OptionsError where
    that was with options of the user's.
    """
    chosen = _options_for(graph.device)

    place = placement.of(graph.device)

    def compile() -> tuple[Any, Any]:
        if place.spans_job:
            return _compile_for_job(lowered, place, chosen), lowered.stage
        with client.x64():
            compiled = lowered.stage.compile(compiler_options=chosen)
        return compiled.runtime_executable(), compiled

    def compiled_here() -> Executable:
        stage = _metrics.stage("CompileTime")
        _metrics.count("CreateCompileHandles")
        count = _metrics.counter("UncachedCompile") or 0
        with _events.timed(stage):
            label = f"compiling {name}: {graph.num_nodes} operators, graph {count + 1}"
            try:
                try:
                    loaded, compiled = interruptible.call(compile, label)
                except jax.errors.JaxRuntimeError as error:
                    if _NO_BARRIER not in str(error):
                        raise
                    chosen[_DISABLED] += f",{_AS_FUNCTION}"
                    loaded, compiled = interruptible.call(compile, label)
            except jax.errors.JaxRuntimeError as error:
                called = lowering.custom_calls(lowered.stage)
                if called and str(error).startswith(_LACKING) and not client.is_own_cpu():
                    # JAX lowers for a kind of device, of which a plugin's may have less than JAX's own.
                    raise NeedsHost(", ".join(called), f"the device has not all of it: {error}") from None
                _events.mark("refused", graph, error)
                custom = dict(options.custom())
                if custom:
                    raise OptionsError(
                        message(
                            "compile",
                            f"got {one_line(error)}, from the device's compiler with options {custom}",
                            expected="options that it knows; what was recorded stays pending",
                            do="correct them, or reset them by torch_xla.set_custom_compile_options({})",
                        )
                    ) from error
                raise
        made = executable(loaded, graph, waits=lowered.has_callback, keep=compiled)
        _events.mark("compiled", graph, made)
        return made

    def loaded(payload: bytes) -> Executable:
        return executable(deserialize(payload, graph.device), graph, elsewhere=True)

    _metrics.add_sample("InputOutputAliasCount", 0 if lowered.has_callback else len(graph.donated), "count")
    if session.connected() is None or lowered.has_callback:
        return compiled_here()
    cache_key = f"{chosen} {place.target}".encode() + lowering.bytecode(lowered.stage.compiler_ir("stablehlo"))
    return shared.once(cache_key, compiled_here, lambda compiled: compiled.loaded.serialize(), loaded)


def _compile_for_job(lowered: lowering.Lowered, place: placement.DeviceSet, chosen: dict[str, Any]) -> Any:
    """Compiles a module of one device with a replica on each of a placement's."""
    options = _options_on(place)
    options.env_option_overrides = list(chosen.items())
    stage: Any = lowered.stage
    return buffers.kind().compile(
        place.local[0].client,
        stage.compiler_ir("stablehlo"),
        xla_client.DeviceList(place.devices),
        options,
        compile_arguments(stage)["host_callbacks"],
    )


def _options_on(place: placement.DeviceSet) -> Any:
    """Options that say which devices run a program: its partitions on a mesh, its replicas elsewhere."""
    import numpy as np

    options = xla_client.CompileOptions()
    build = options.executable_build_options
    ids = np.array([[device.id for device in place.devices]])
    ids = ids if place.mesh else ids.T
    options.num_replicas = build.num_replicas = ids.shape[0]
    options.num_partitions = build.num_partitions = ids.shape[1]
    build.use_spmd_partitioning = place.mesh
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    return options


def deserialize(payload: bytes, device: int) -> Any:
    """XLA's executable for a device, of its serialized form, which may have been made for another.

    Raises RuntimeError where it is none, or one of another machine, or the client keeps it to the device it was made
    for.
    """
    place = placement.of(device)
    client_of = place.local[0].client
    loaded = client_of.deserialize_executable(payload, xla_client.DeviceList(place.devices), _options_on(place))
    if set(loaded.local_devices()) != set(place.local):
        raise RuntimeError(
            f"[compile] got a cached program for {loaded.local_devices()}, expected one for {place.local}; "
            "clear the cache"
        )
    return loaded
