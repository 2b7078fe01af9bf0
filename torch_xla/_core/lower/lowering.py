"""Lowers a graph to StableHLO, as one JAX program: ``x * 2 + y`` becomes `stablehlo.multiply` and `stablehlo.add`.

Each node signature is its own `jax.jit`, so that equal nodes are traced once per process and become one private
function of the module: 2,000 nodes lower in 0.2 s instead of 0.9 s. Only views and custom calls are inlined.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax

from torch_xla import _config, _events, _fallbacks, _jax_internals
from torch_xla._core.device import client, environment, placement, shardings
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Edge, Graph, Node, Number, fill_template
from torch_xla._core.lower import convolutions, manual_lowering, placing, rolling, scopes, tpu_limits
from torch_xla._core.lower.calling_convention import ProgramSignature, number_indices
from torch_xla._core.lower.composites import MARKS, CompositeRegion, boundary, plan
from torch_xla._core.lower.horizontal import HorizontalPlan
from torch_xla._errors import message
from torch_xla._jax_internals import PassManager, ir, source_info_util
from torch_xla.ops import collective, conv, fallback, host_kernel, precision
from torch_xla.ops.call import call, find_overload, load_rules
from torch_xla.ops.call_settings import as_recorded
from torch_xla.ops.composite import composite, name_meanings
from torch_xla.ops.decompositions import separate
from torch_xla.ops.registry import Meta, NumberInput, StaticNumbers, seed_words

_CAPACITY = 1 << 14  # signatures; a program of ever new shapes must not grow for ever

# A primitive each, for which a function of its own would be more work for everybody.
_INLINED = frozenset(
    f"aten.{name}"
    for name in ("alias.default", "detach.default", "expand.default", "permute.default", "slice.Tensor", "t.default")
    + ("transpose.int", "unsqueeze.default", "view.default", "_unsafe_view.default", "squeeze.dim", "select.int")
) | {"xla.custom_call.default"}  # which may be about the argument of the program that it is given

# What a node of a traced graph is that calls a function of arrays, its first argument, with the values in its second.
FUNCTION = "function"

_rules: dict[Any, Callable[..., Any]] = {}

Numbers = tuple[list[Any], Any]  # of a node: its numbers, and the words of its seed if it draws
Results = dict[int, Any]  # of each node, by index

if scopes.on():
    # The line of an operator is the user's, not that of the rule.
    source_info_util.register_exclusion(os.path.dirname(_config.__file__) + os.sep)


class _ThreadState(threading.local):
    inside = False


_thread = _ThreadState()


def inside() -> bool:
    """Whether this thread is in the midst of JAX's tracing."""
    return _thread.inside


def check_not_inside() -> None:
    """Raises where this thread is in the midst of JAX's tracing, which would take what is computed for a part of it."""
    if inside():
        raise RuntimeError(
            message(
                "sync",
                "got a barrier inside the lowering of a graph, of a finalizer or a signal handler",
                do="read there what is computed already, or compute it later",
            )
        )


@dataclass(frozen=True)
class Lowered:
    """A graph as StableHLO: JAX's stage, and whether its program calls back into Python on the host."""

    stage: jax.stages.Lowered
    has_callback: bool


class LoweringError(RuntimeError):
    """A node could not be lowered; names the operator and, if known, the user's line."""

    def __init__(self, text: str, node: Node) -> None:
        super().__init__(text)
        self.node = node


def lower(graph: Graph, name: str = "graph", to_run: bool = False, platform: str | None = None) -> Lowered:
    """Lowers a graph to StableHLO; `calling_convention.py` defines the inputs and results of its program.

    With `to_run` the program is to be executed on the graph's device: it returns a token too, which `dispatch.py`
    needs, and may call functions of this process. Without it the program is to be shown or exported. `platform` is
    JAX's name of a target other than the graph's device, such as ``"tpu"``; this machine need not have one. `name` is
    the module's name in dumps and profiles.

    Raises StaticNumbers where a rule needs a constant in place of a number input, NeedsHost where an operator needs a
    host callback and the device's programs cannot make one, and LoweringError where a node could not be lowered.
    """
    load_rules()  # not part of what is timed
    place = placement.of(graph.device)
    target = platform or place.platform
    graph = rolling.mark_layer_loops(graph, target, place.mesh)
    order = steps(graph)
    places = number_indices(graph)
    rank = environment.rank_info().rank if any(map(sequence.is_collective, graph.nodes)) else 0
    collective_numbers = sequence.numbers(graph, rank)
    parts = manual_lowering.find(graph)

    def program(*inputs: Any) -> tuple[Any, ...]:
        placed_inputs = placing.spread(inputs, convention.places, place)
        values, vectors = convention.arguments(placed_inputs)
        results: Results = {}
        turns = collective.Order(dict(collective_numbers), not place.spans_job)
        numbers = {
            (vector, index): jax.lax.index_in_dim(vectors[vector], index, keepdims=False)
            for vector, index in dict.fromkeys(itertools.chain.from_iterable(places))
        }
        numbers_by_node: list[Numbers] = []
        for node, node_places in zip(graph.nodes, places, strict=True):
            scalars = [numbers[place] for place in node_places]
            numbers_by_node.append((scalars[:-2], (scalars[-2], scalars[-1])) if node.seeded else (scalars, None))

        def value(edge: Edge) -> Any:
            return values[edge.slot] if edge.leaf else results[edge.slot][edge.result]

        stacks = convention.stacks(placed_inputs)
        loops = rolling.Loops(loop_plan, places, vectors, stacks, convention.index_value, value, _compute_on)
        for step in order:
            if not isinstance(step, int):
                results.update(_composite(graph, step, values, results, numbers_by_node))
            elif step in loop_plan.owner:
                if step not in results:
                    results.update(loops.run(loop_plan.owner[step][0]))
            elif sequence.is_collective(graph.nodes[step]):
                node = graph.nodes[step]
                results[step] = collective.compute(node.args[1], _operands(node, values, results), rank, turns)
            elif step in parts or graph.nodes[step].op == manual_lowering.LEAVE:
                results[step] = _on_parts(graph, graph.nodes[step], values, results, numbers_by_node[step], parts)
            elif step in live_nodes:
                results[step] = _compute(graph.nodes[step], values, results, numbers_by_node[step])

        pack_arrays = convention.packs(placed_inputs)
        packs = horizontal_plan.compute(pack_arrays, value, numbers.__getitem__, _compute_on, loops.several)
        return convention.results(value, packs)

    program.__name__ = name
    wants = _rule_scope(place if to_run else None)
    mesh = _config.within(conv.over_mesh, place.mesh)
    limits = _config.within(tpu_limits.applies, target == "tpu")
    axes = shardings.within_program(placing.axes_of(graph) if place.mesh else None)
    with wants, mesh, limits, axes, gc_paused(), _events.timed("LoweringTime"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        convention = ProgramSignature(graph, to_run, target)
        packed = convention.input_packs, convention.result_packs, convention.stack_edges
        horizontal_plan = HorizontalPlan(graph, places, *packed)
        shared = {w for node in graph.nodes if sequence.is_collective(node) for w in node.inputs}
        root_edges = {*convention.singles, *horizontal_plan.singles, *shared}
        looped = {edge for run in graph.layers for slot in run.slots for edge in graph.nodes[slot].inputs}
        live_nodes = _live_nodes(graph, root_edges | looped)
        loop_plan = rolling.LoopPlan(graph, live_nodes, root_edges)
        to = tuple(place.in_module(number, shape) for shape, number in convention.result_buffers)
        jitted = jax.jit(program, keep_unused=True, out_shardings=to)
        types = [
            jax.ShapeDtypeStruct(place.buffer_shape(number, shape), dtype, sharding=place.in_module(number, shape))
            for (shape, dtype), number in zip(convention.buffers, convention.places, strict=True)
        ]
        stage = jitted.trace(*types).lower(lowering_platforms=None if platform is None else (platform,))
    module = stage.compiler_ir("stablehlo")
    if not isinstance(order, range):
        name_meanings(module)
    _set_aliases(module, convention.aliases)
    if place.mesh:
        convolutions.constrain(module)
    if target == "tpu":
        tpu_limits.by_parts(module)
    return Lowered(stage, count_callbacks(stage) > 0)


@contextmanager
def _rule_scope(place: placement.DeviceSet | None) -> Iterator[None]:
    """A scope in which rules are run, for the devices of a place or, without one, to be shown or exported."""
    kernels = host_kernel.enabled(place is not None and place.on_host)
    host = fallback.where(None if place is None else client.has_callbacks)
    before, _thread.inside = _thread.inside, True
    try:
        with _jax_internals.as_rules_want(precision.current().products), kernels, host:
            yield
    finally:
        _thread.inside = before


def compute_alone(
    node: Node, arrays: list[Any], numbers: list[Any], seed: tuple[int, int] | None, place: placement.DeviceSet | None
) -> tuple[Any, ...]:
    """Computes a node, no collective, by itself, now, as a program would; `seed` is (seed, offset), if it draws.

    `place` is where the arrays are; None where they are in memory of JAX's own CPU client, for a device elsewhere.
    Raises StaticNumbers and LoweringError as `lower` does.
    """
    load_rules()
    if node.op in MARKS or node.op == placing.OPERATOR:  # JAX splits nothing by itself that does not divide
        return (arrays[0],)
    with _rule_scope(place):
        return _compute_on(node, arrays, numbers, None if seed is None else seed_words(*seed))


@contextmanager
def gc_paused() -> Iterator[None]:
    """A scope without garbage collections: most of what tracing makes dies soon, and a full one takes 0.3 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _set_aliases(module: Any, aliases: dict[int, int | None]) -> None:
    """Says which inputs the program may overwrite, and with which results.

    JAX would pair them with results of the same type in their order, and XLA copy both where the tensors are others.
    """
    with module.context:
        name = ir.StringAttr.get("main")
        main = next(f for f in module.body.operations if f.attributes["sym_name"] == name)
        attributes = [_items(ir.DictAttr(entry)) for entry in main.arg_attrs]
        for slot, result in aliases.items():
            if result is None:
                attributes[slot]["jax.buffer_donor"] = ir.BoolAttr.get(True)
            else:
                index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), result)
                attributes[slot]["tf.aliasing_output"] = index
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in attributes])


def _items(attributes: Any) -> dict[str, Any]:
    return {attributes[k].name: attributes[k].attr for k in range(len(attributes))}


def compute(graph: Graph, leaves: Mapping[int, Any], given: list[Numbers]) -> Results:
    """The results of a graph that is a part of a program, of values for its leaves and the numbers of each node.

    It has no collectives, nor parts of devices.
    """
    results: Results = {}
    for step in steps(graph):
        if isinstance(step, int):
            results[step] = _compute(graph.nodes[step], leaves, results, given[step])
        else:
            results.update(_composite(graph, step, leaves, results, given))
    return results


def steps(graph: Graph) -> Sequence[int | CompositeRegion]:
    """The nodes in their order, with those of a composite as one."""
    marks = {i: boundary(node.args[1:]) for i, node in enumerate(graph.nodes) if node.op in MARKS}
    if not marks:
        return range(len(graph.nodes))
    operands = [{edge.slot for edge in node.inputs if not edge.leaf} for node in graph.nodes]
    free = {i for i, node in enumerate(graph.nodes) if not node.inputs and not node.seeded}
    return plan(marks, operands, [slot for slot, _ in graph.outputs], free)


def _live_nodes(graph: Graph, edges: set[Edge]) -> set[int]:
    """The nodes that these edges need; all of a graph with composites."""
    if any(node.op in MARKS for node in graph.nodes):
        return set(range(len(graph.nodes)))
    live_nodes = {edge.slot for edge in edges if not edge.leaf}
    for slot in reversed(range(len(graph.nodes))):
        if slot in live_nodes:
            live_nodes.update(edge.slot for edge in graph.nodes[slot].inputs if not edge.leaf)
    return live_nodes


def _composite(
    graph: Graph, region: CompositeRegion, leaves: Mapping[int, Any], results: Results, given: list[Numbers]
) -> Results:
    """Computes a composite: its marked operands come first, then what else its operators read."""
    edges = [edge for i in region.members for edge in graph.nodes[i].inputs]
    outer = {w.slot: results[w.slot] for w in edges if not w.leaf and w.slot not in (*region.members, *region.inputs)}
    inner_leaves = {edge.slot: leaves[edge.slot] for edge in edges if edge.leaf}
    numbers = {i: given[i] for i in region.members if given[i] != ([], None)}

    def meaning(
        marked: list[Any], inner_leaves: dict[int, Any], outer: Results, numbers: dict[int, Numbers]
    ) -> list[Any]:
        inner = outer | {mark: (value,) for mark, value in zip(region.inputs, marked, strict=True)}
        for i in region.members:
            inner[i] = _compute(graph.nodes[i], inner_leaves, inner, numbers.get(i, ([], None)))
        return [inner[mark][0] for mark in region.outputs]

    marked = [results[mark][0] for mark in region.inputs]
    outputs = composite(meaning, region.name, region.attributes, (marked, inner_leaves, outer, numbers))
    return {mark: (value,) for mark, value in zip(region.outputs, outputs, strict=True)}


def like_nodes(graph: Graph, node: Node) -> tuple[int, ...]:
    """Positions of the nodes that do the same as a node of this graph, on inputs of the same types."""

    def types(node: Node) -> list[Meta | None]:
        return [graph.meta(edge) for edge in node.inputs]

    signature = node.call, types(node)
    return tuple(i for i, other in enumerate(graph.nodes) if (other.call, types(other)) == signature)


def _operands(node: Node, leaves: Mapping[int, Any], results: Results) -> list[Any]:
    return [leaves[w.slot] if w.leaf else results[w.slot][w.result] for w in node.inputs]


def _compute(node: Node, leaves: Mapping[int, Any], results: Results, given: Numbers) -> tuple[Any, ...]:
    tensors = _operands(node, leaves, results)
    if node.op in MARKS:
        return (tensors[0],)
    return _compute_on(node, tensors, *given)


def _on_parts(
    graph: Graph, node: Node, leaves: Mapping[int, Any], results: Results, given: Numbers, parts: frozenset[int]
) -> tuple[Any, ...]:
    tensors = _operands(node, leaves, results)
    inside = [manual_lowering.is_part(graph, edge, parts) for edge in node.inputs]
    numbers, seed = given
    return manual_lowering.compute(node, tensors, inside, numbers, seed, lambda *args: _compute_on(node, *args))


def _compute_on(node: Node, tensors: list[Any], values: list[Any], seed: Any = None) -> tuple[Any, ...]:
    if node.waits:
        seed = jax.lax.optimization_barrier((*seed, tensors.pop()))[:2]
    if node.op == FUNCTION:
        function, operands = fill_template(node, tensors, lambda number: number.value)
        return tuple(function(*operands))
    if node.op == placing.OPERATOR:
        return (placing.constrained(tensors[0], node.args[1]),)
    _fallbacks.lowering_at(node.frame)
    try:
        return _apply(node, tensors, values, seed)
    except (StaticNumbers, LoweringError, MemoryError):
        raise
    except fallback.NeedsHost as needs_host:
        needs_host.node = node
        raise
    except Exception as error:
        where = f"\n  recorded at {node.frame}" if node.frame else "\n  (XLA_IR_DEBUG=1 tells the line)"
        failure = LoweringError(f"[lower {node.op}] {type(error).__name__}: {error}{where}", node)
        try:
            raise failure from error
        finally:
            del failure  # it would hold itself, with the caller's variables


def _apply(node: Node, tensors: list[Any], values: list[Any], seed: Any) -> tuple[Any, ...]:
    tpu_limits.check(node.outs, _unjitted(node), tensors, values, seed)
    if not scopes.on():
        return _rule(node, tensors)(tensors, values, seed)
    # Not outlined, since equal operators of several modules and lines have several names.
    with jax.named_scope(node.scope) if node.scope else nullcontext():
        return scopes.call_at(node.frame, lambda: _unjitted(node)(tensors, values, seed))


def _rule(node: Node, tensors: list[Any]) -> Callable[..., Any]:
    """The node's operator as a function of (tensors, numbers, seed), jitted, one per signature."""
    if node.attrs is None:
        return _unjitted(node)
    avals = tuple((t.shape, t.dtype) for t in tensors)
    host = host_kernel.in_use(), fallback.callback_policy()
    # What is computed now, by itself, is always a program.
    inlined = node.op in _INLINED and any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)
    key = (node.call, avals, node.outs, precision.current(), host, conv.over_mesh.get(), inlined)
    cached_rule = _rules.get(key)
    if cached_rule is not None:
        return cached_rule
    rule = _unjitted(node)
    if len(_rules) >= _CAPACITY:
        _rules.clear()
    rule.__name__ = node.op.replace(".", "_")
    cached_rule = _rules[key] = rule if inlined else jax.jit(rule)
    return cached_rule


def _unjitted(node: Node) -> Callable[..., tuple[Any, ...]]:
    op = find_overload(node.op)

    def rule(tensors: list[Any], numbers: list[Any], seed: Any) -> tuple[Any, ...]:
        def lifted(n: Number) -> NumberInput:
            return NumberInput(numbers[n.index], type(n.value), node.op, n.argument, n.varied)

        values = fill_template(node, tensors, lifted)
        with as_recorded(node.settings):
            return call(op, *separate(op, values), node.outs, seed)

    return rule


def count_callbacks(stage: jax.stages.Lowered) -> int:
    """How many functions of this process a program calls."""
    arguments = _jax_internals.compile_arguments(stage)
    return len(arguments.get("host_callbacks") or ()) + len(arguments.get("keepalive") or ())


def custom_calls(stage: jax.stages.Lowered) -> list[str]:
    """Names of what a program calls that is not XLA's own, such as LAPACK's functions."""
    return sorted(set(re.findall(r"stablehlo\.custom_call @([^\s(]+)", stage.as_text())))


def hlo_text(stage: jax.stages.Lowered) -> str:
    """The module as HLO text: instructions are named by what they do, and operands have types, as results have.

    With ``XLA_HLO_DEBUG=1`` they have their module's path, operator and line, and names that come from these.
    """
    options = _jax_internals.HloPrintOptions()
    options.print_operand_shape = True
    options.print_metadata = scopes.on()
    text = stage.as_text(debug_info=scopes.on())  # names come from locations where the text has some
    return _jax_internals.mlir.mlir_module_to_xla_computation(text).get_hlo_module().to_string(options)


def bytecode(module: Any, locations: bool = True) -> bytes:
    """A module in MLIR's binary form, as other StableHLO tools read it.

    By `locations` with the lines of its operations.
    """
    from io import BytesIO

    if not locations:
        with module.context:
            module = module.operation.clone()
            PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
    buffer = BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()
