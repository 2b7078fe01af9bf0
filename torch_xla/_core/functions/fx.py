"""Translates PyTorch's traced graphs (`torch.export`, `make_fx`) to this package's `Graph`, which `lower/` lowers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from torch_xla import _bindings
from torch_xla._core.functions.sizes import Sizes, is_open_size
from torch_xla._core.graph.graph import Edge, Graph, Input, Node, Number
from torch_xla._core.lower import lowering
from torch_xla._torch_internals import OpOverload, pytree
from torch_xla.ops import dtypes, precision
from torch_xla.ops.call import find_overload, way_of
from torch_xla.ops.decompositions import bind, requested_results
from torch_xla.ops.registry import Meta, seed_words

Arrays = Sequence[Any]


@dataclass(frozen=True)
class Function:
    """A traced graph as a function of JAX arrays; a call takes one per placeholder, or anything where it is no tensor.

    Numbers are constants in the graph, except those that `lifted` made inputs, and sizes that are left open.
    """

    graph: Graph
    inputs: tuple[int | None, ...]  # leaf that each placeholder is, None where it is no tensor
    constants: dict[int, torch.Tensor]  # further leaves, with their values
    # what each node's numbers are: sizes that are left open, or None for a number of the call's
    sizes: tuple[tuple[Any, ...], ...]
    output: Any  # what is returned, with edges for tensors

    def __call__(self, *inputs: Any, numbers: Arrays = (), seed: Any = None) -> Any:
        """Computes it, with the arrays that `lifted` returned for `numbers`.

        Random operators draw from `seed`, an array of one integer; by default from PyTorch's, the same numbers each
        time.
        """
        leaves = {leaf: _array(value) for leaf, value in self.constants.items()}
        leaves |= {leaf: x for leaf, x in zip(self.inputs, inputs, strict=False) if leaf is not None}
        rest = iter(numbers)
        numbers_by_node: list[lowering.Numbers] = []
        for position, (node, sizes) in enumerate(zip(self.graph.nodes, self.sizes, strict=True)):
            scalars = [next(rest) if size is None else jax.numpy.asarray(size, "int64") for size in sizes]
            numbers_by_node.append((scalars, _seed(position, seed) if node.seeded else None))
        with jax.default_matmul_precision(precision.current().products):
            results = lowering.compute(self.graph, leaves, numbers_by_node)

        def value(x: Any) -> Any:
            if not isinstance(x, Edge):
                return x
            return leaves[x.slot] if x.leaf else results[x.slot][x.result]

        return pytree.tree_map(value, self.output, is_leaf=lambda x: isinstance(x, Edge))

    def lifted(self, static: Set[str]) -> tuple[Function, list[Any]]:
        """The function with its numbers, but 0 and 1, as inputs, and an array for each.

        Numbers of `static` operators, and of composites, stay constants.
        """
        parts = (step for step in lowering.steps(self.graph) if not isinstance(step, int))
        inside = {i for region in parts for i in region.members}
        arrays: list[Any] = []
        nodes, sizes = list(self.graph.nodes), list(self.sizes)
        for i, node in enumerate(nodes):
            if i not in inside and node.op not in static and node.op != lowering.FUNCTION:
                node_sizes = list(sizes[i])
                nodes[i] = replace(node, args=tuple(_lift(node, node_sizes, arrays)))
                sizes[i] = tuple(node_sizes)
        return replace(self, graph=replace(self.graph, nodes=tuple(nodes)), sizes=tuple(sizes)), arrays


def _lift(node: Node, sizes: list[Any], arrays: list[Any]) -> Iterable[Any]:
    """The arguments of an operator with numbers as inputs, which are added to those that it has."""
    count = 0
    for position, (x, a) in enumerate(zip(node.args, find_overload(node.op)._schema.arguments, strict=True)):
        if isinstance(x, Number):
            x = replace(x, index=count)
        elif type(x) in (int, float) and x not in (0, 1) and isinstance(a.type, _ARITHMETIC) and not a.kwarg_only:
            # The types PyTorch gives such a number when it becomes a tensor.
            arrays.append(jax.numpy.asarray(x, dtypes.numpy_dtype(torch.tensor(x).dtype)))
            sizes.insert(count, None)
            x = Number(count, x, position)
        count += isinstance(x, Number)
        yield x


def function_of(module: torch.fx.GraphModule, sizes: Sizes | None = None) -> Function:
    """A traced graph as a function of JAX arrays; its operators are no functions of their own in the module.

    It has ATen operators that write nothing, with `meta["val"]` on its nodes; `sizes` translates sizes that are left
    open. Raises NotImplementedError where it calls something that is no operator known here.
    """
    return _Translation(module, sizes).function()


class _Translation:
    """One pass over a traced graph."""

    def __init__(self, module: torch.fx.GraphModule, sizes: Sizes | None) -> None:
        self._module = module
        self._sizes = sizes or Sizes()
        self._frame = _bindings.user_frame()
        self._values: dict[torch.fx.Node, Any] = {}  # edges for tensors
        self._nodes: list[Node] = []
        self._open: list[tuple[Any, ...]] = []
        self._leaves: list[Meta] = []
        self._constants: dict[int, torch.Tensor] = {}

    def function(self) -> Function:
        inputs: list[int | None] = []
        output = None
        for node in self._module.graph.nodes:
            if node.op == "output":
                output = self._filled(node.args[0])
                continue
            value = node.meta.get("val")
            if node.op == "placeholder":
                translated = self._leaf(value) if isinstance(value, torch.Tensor) else None
                inputs.append(translated.slot if translated else None)
            elif node.op == "get_attr":
                translated = _attribute(self._module, node.target)
                if isinstance(translated, torch.Tensor):
                    constant, translated = translated, self._leaf(translated)
                    self._constants[translated.slot] = constant
            else:
                translated = self._called(node, value)
            self._values[node] = translated
        graph = Graph("", _bindings.current_device(), tuple(self._nodes), tuple(self._leaves), _outputs(output), ())
        return Function(graph, tuple(inputs), self._constants, tuple(self._open), output)

    def _leaf(self, value: torch.Tensor) -> Edge:
        self._leaves.append(self._meta(value))
        return Edge(True, len(self._leaves) - 1, 0)

    def _meta(self, value: torch.Tensor) -> Meta:
        return Meta(self._sizes.shape(value), value.dtype)

    def _filled(self, arguments: Any) -> Any:
        return torch.fx.node.map_aggregate(arguments, lambda x: self._values[x] if isinstance(x, torch.fx.Node) else x)

    def _called(self, node: torch.fx.Node, value: Any) -> Any:
        target: Any = node.target
        if isinstance(value, torch.SymInt):
            return self._sizes.of(value)
        if (
            target in _ASSERTIONS
            or isinstance(value, torch.SymBool)
            and all(user.target in _ASSERTIONS for user in node.users)
        ):
            return None  # the module has its own, of the sizes
        if target is operator.getitem:
            return self._values[node.args[0]][node.args[1]]  # type: ignore[index]
        if isinstance(target, OpOverload):
            return self._operator(node, target, value)
        if target in _HIGHER_ORDER:
            return self._higher_order(node, _HIGHER_ORDER[target], value)
        raise NotImplementedError(
            f"[fx] got a call of {target}, expected an ATen operator; decompose the graph first (run_decompositions())"
        )

    def _operator(self, node: torch.fx.Node, op: OpOverload, value: Any) -> Any:
        if op._schema.is_mutable:
            raise NotImplementedError(f"[fx] {op} writes to its arguments; run the graph's decompositions first")
        positional, keywords = bind(op, self._filled(node.args), self._filled(node.kwargs))
        declared = [isinstance(a.type, _ARITHMETIC) and not a.kwarg_only for a in op._schema.arguments]
        sizes: list[Any] = []
        arguments = [*positional, *keywords.values()]
        for position, (x, arithmetic) in enumerate(zip(arguments, declared, strict=True)):
            if arithmetic and is_open_size(x):  # it takes part in it as a number of the program
                arguments[position] = Number(len(sizes), 0, position)
                sizes.append(x)
        return self._add(str(op), arguments, requested_results(op, positional, value), draws(node), sizes)

    def _higher_order(self, node: torch.fx.Node, kind: Callable[..., Any], value: Any) -> Any:
        arguments = self._filled(node.args)
        modules = [x for x in arguments if isinstance(x, torch.fx.GraphModule)]
        functions = [function_of(module, self._sizes) for module in modules]
        operands, spec = pytree.tree_flatten([x for x in arguments if not isinstance(x, torch.fx.GraphModule)])

        def compute(*arrays: Any) -> Any:
            return kind(*functions, *pytree.tree_unflatten(arrays, spec))

        return self._add(lowering.FUNCTION, [compute, operands], value)

    def _add(
        self, op: str, arguments: Sequence[Any], value: Any, seeded: bool = False, sizes: Sequence[Any] = ()
    ) -> Any:
        """Adds a node; returns edges in the structure of what it gives."""
        inputs: list[Edge] = []

        def placed(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [placed(element) for element in x]
            if not isinstance(x, Edge):
                return x
            inputs.append(x)
            return Input(len(inputs) - 1)

        args = tuple(map(placed, arguments))
        flat, spec = pytree.tree_flatten(value)
        outs = tuple(self._meta(v) if isinstance(v, torch.Tensor) else None for v in flat)
        settings = _bindings.call_settings()
        self._nodes.append(Node(op, args, tuple(inputs), outs, seeded, self._frame, attrs=None, settings=settings))
        self._open.append(tuple(sizes))
        edges = [None if out is None else Edge(False, len(self._nodes) - 1, i) for i, out in enumerate(outs)]
        return pytree.tree_unflatten(edges, spec)


def _outputs(output: Any) -> tuple[tuple[int, int], ...]:
    edges = [x for x in pytree.tree_leaves(output) if isinstance(x, Edge)]
    return tuple((edge.slot, edge.result) for edge in edges if not edge.leaf)


def check_exportable(module: torch.fx.GraphModule) -> None:
    """Refuses, by NotImplementedError, graphs of operators that only run on the host.

    Their module could not run alone.
    """
    operators = {n.target for n in module.graph.nodes if isinstance(n.target, OpOverload)} - _ASSERTIONS
    host = sorted(str(op) for op in operators if way_of(str(op)) == "callback")
    if host:
        raise NotImplementedError(
            f"[fx] got {', '.join(host)}, which only run(s) on the host, expected operators with a rule or a "
            "decomposition; use others, or decompose them"
        )


def draws(node: torch.fx.Node) -> bool:
    """Whether a node is an operator that draws random numbers."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _seed(position: int, seed: Any | None) -> tuple[Any, Any]:
    """A graph by itself has no random state; its position tells an operator's numbers from those of the others."""
    start = torch.initial_seed() & (2**63 - 1) if seed is None else jax.numpy.asarray(seed, "int64")
    return seed_words(start, position if seed is None else jax.numpy.asarray(position, "int64"))


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _array(tensor: torch.Tensor) -> Any:
    from torch_xla.ops.fallback import to_numpy

    return jax.numpy.asarray(to_numpy(tensor.cpu()))


def arrays_of(values: Sequence[Any]) -> list[Any]:
    """Arrays, also of Python numbers."""
    return [jax.numpy.asarray(v) for v in values]


def while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Arrays, more: Arrays = ()
) -> list[Any]:
    """A loop whose condition is a program too: `condition` and `body` take the carried and the further values.

    The one returns a truth value, the other the carried values of the next turn, which keep shape and dtype.
    """
    start = tuple(arrays_of(carried))

    def turn(state: Any) -> tuple[Any, ...]:
        after = pytree.tree_leaves(body(*state, *more))
        return tuple(jax.numpy.asarray(a, s.dtype) for a, s in zip(after, state, strict=True))

    def goes_on(state: Any) -> Any:
        return jax.numpy.reshape(jax.numpy.asarray(pytree.tree_leaves(condition(*state, *more))[0]), ()).astype(bool)

    return list(jax.lax.while_loop(goes_on, turn, start))


def _cond(true: Function, false: Function, predicate: Any, operands: Arrays = ()) -> Any:
    branches = [lambda *xs, b=b: tuple(arrays_of(pytree.tree_leaves(b(*xs)))) for b in (true, false)]
    return jax.lax.cond(jax.numpy.reshape(predicate, ()).astype(bool), *branches, *operands)


_ARITHMETIC = (torch.NumberType, torch.TensorType)
_ASSERTIONS = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
}
_HIGHER_ORDER: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.while_loop: while_loop,
    torch.ops.higher_order.cond: _cond,
}
