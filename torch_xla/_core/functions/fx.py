"""Graphs of PyTorch's tracers (`torch.export`, `make_fx`) as JAX functions, without the recorder."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch
from torch.utils import _pytree as pytree

from torch_xla._core.functions.sizes import Sizes, is_open_size
from torch_xla._core.lower.composites import MARKS, Region, boundary, plan
from torch_xla.ops import dtypes, precision
from torch_xla.ops.call import call, way_of
from torch_xla.ops.composite import composite
from torch_xla.ops.decompositions import asked, bind
from torch_xla.ops.registry import Lifted, Meta, StaticNumbers

Arrays = Sequence[Any]


@dataclass(frozen=True)
class _Pass:
    """What holds for one pass over a graph: see `as_jax`."""

    numbers: Numbers | None = None
    seed: Any | None = None
    sizes: Sizes = field(default_factory=Sizes)


def as_jax(
    module: torch.fx.GraphModule, numbers: Numbers | None = None, seed: Any | None = None, sizes: Sizes | None = None
) -> Callable[..., Any]:
    """A traced graph as a JAX function.

    Args:
        module: A graph of ATen operators that write nothing, with `meta["val"]` on its nodes.
        numbers: Takes the numbers that shall be inputs of the program; by default all are constants.
        seed: What its random operators draw from, an array of one integer; by default PyTorch's seed, so that they draw
            the same numbers each time.
        sizes: Translates sizes that are left open; by default there are none.

    Returns:
        A function of one array (or Python value) per placeholder that returns what the graph returns, with arrays for
        tensors.

    Raises:
        NotImplementedError: (when it is traced) the graph calls something that is no operator known here.
    """
    return _as_jax(module, _Pass(numbers, seed, sizes or Sizes()))


def _as_jax(module: torch.fx.GraphModule, this: _Pass) -> Callable[..., Any]:
    nodes = list(module.graph.nodes)
    steps = _steps(nodes)

    def function(*inputs: Any) -> Any:
        taken = [node for node in nodes if node.op == "placeholder"]
        values: dict[torch.fx.Node, Any] = dict(zip(taken, inputs, strict=False))
        with jax.default_matmul_precision(precision.current().products):
            for step in steps:
                if not isinstance(step, int):
                    values.update(_composite(nodes, step, values, this))
                    continue
                node = nodes[step]
                if node.op == "get_attr":
                    values[node] = _constant(_attribute(module, node.target))
                elif node.op == "output":
                    return _filled(node.args[0], values)
                elif node.op != "placeholder":
                    values[node] = _call(node, _filled(node.args, values), _filled(node.kwargs, values), this)
        raise AssertionError("a graph ends with its output")

    return function


def _steps(nodes: list[torch.fx.Node]) -> Sequence[int | Region]:
    """The nodes in their order, with those of a composite as one."""
    marks = {
        i: boundary(bind(node.target, node.args, node.kwargs)[0][1:])  # type: ignore[arg-type]
        for i, node in enumerate(nodes)
        if str(node.target) in MARKS
    }
    if not marks:
        return range(len(nodes))
    index = {node: i for i, node in enumerate(nodes)}
    operands = [{index[x] for x in node.all_input_nodes} for node in nodes]
    free = {i for i, node in enumerate(nodes) if node.op == "call_function" and not operands[i] and not draws(node)}
    return plan(marks, operands, [len(nodes) - 1], free)


def _composite(nodes: list[torch.fx.Node], region: Region, values: dict[torch.fx.Node, Any], this: _Pass) -> Any:
    """What a composite gives: its marked operands come first, then what else its operators take."""
    members = [nodes[i] for i in region.members]
    marked = [nodes[i] for i in region.inputs]
    reads = {x for node in members for x in node.all_input_nodes}.difference(members, marked)
    outer = [node for node in nodes if node in reads]

    def meaning(operands: list[Any], others: list[Any], seed: Any) -> list[Any]:
        within = replace(this, numbers=None, seed=seed)
        inner = dict(zip([*marked, *outer], [*operands, *others], strict=True))
        for node in members:
            inner[node] = _call(node, _filled(node.args, inner), _filled(node.kwargs, inner), within)
        return [inner[nodes[i]] for i in region.outputs]

    given = ([values[node] for node in marked], [values[node] for node in outer], this.seed)
    found = composite(meaning, region.name, region.attributes, given)
    return dict(zip([nodes[i] for i in region.outputs], found, strict=True))


def check_exportable(module: torch.fx.GraphModule) -> None:
    """Refuses graphs that cannot become a module that runs by itself.

    Raises:
        NotImplementedError: Some operators only run on the host.
    """
    operators = {n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)} - _ASSERTIONS
    host = sorted(str(op) for op in operators if way_of(str(op)) == "callback")
    if host:
        raise NotImplementedError(
            f"[fx] got {', '.join(host)}, which only run(s) on the host, expected operators with a rule or a "
            "decomposition; use others, or decompose them"
        )


class Numbers:
    """Numbers of a graph that are inputs of the program: those of operators that can take them so.

    Attributes:
        arrays: One 0-d array per number, in the order of use.
        static: Operators whose numbers must be constants.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.static: set[str] = set()
        self._tracers: list[Any] | None = None
        self._taken = 0

    def start(self, tracers: Sequence[Any] | None) -> None:
        """Begins a pass over the graph: one that collects the numbers, or one that uses `tracers` for them."""
        self._taken = 0
        self._tracers = None if tracers is None else list(tracers)
        if tracers is None:
            self.arrays = []

    def lift(self, op: torch._ops.OpOverload, arguments: Sequence[Any]) -> list[Any]:
        """The arguments with numbers replaced."""
        if str(op) in self.static:
            return list(arguments)
        declared = [a for a in op._schema.arguments if not a.kwarg_only]
        return [
            self._lifted(x) if type(x) in (int, float) and x not in (0, 1) and isinstance(a.type, _ARITHMETIC) else x
            for x, a in zip(arguments, declared, strict=True)
        ]

    def _lifted(self, number: float) -> Lifted:
        self._taken += 1
        if self._tracers is not None:
            return Lifted(self._tracers[self._taken - 1], type(number))
        import numpy as np

        # The types PyTorch gives such a number when it becomes a tensor.
        array = np.asarray(number, dtypes.numpy_dtype(torch.tensor(number).dtype))
        self.arrays.append(array)
        return Lifted(jax.numpy.asarray(array), type(number))


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _constant(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    from torch_xla.ops.fallback import to_numpy

    return jax.numpy.asarray(to_numpy(value.cpu()))


def _filled(arguments: Any, values: dict[torch.fx.Node, Any]) -> Any:
    return torch.fx.node.map_arg(arguments, lambda node: values[node])


def _call(node: torch.fx.Node, args: Any, kwargs: dict[str, Any], this: _Pass) -> Any:
    target: Any = node.target
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return this.sizes.of(value)
    if (
        target in _ASSERTIONS
        or isinstance(value, torch.SymBool)
        and all(user.target in _ASSERTIONS for user in node.users)
    ):
        return None  # the module has its own, of the sizes
    if isinstance(target, torch._ops.OpOverload):
        return _operator(node, target, args, kwargs, this)
    if target in _HIGHER_ORDER:
        return _HIGHER_ORDER[target](node, this, *args, **kwargs)
    if target is operator.getitem:
        return args[0][args[1]]
    raise NotImplementedError(f"[fx] got a call of {target}, expected an ATen operator")


def _operator(node: torch.fx.Node, op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], this: _Pass) -> Any:
    if op._schema.is_mutable:
        raise NotImplementedError(f"[fx] {op} writes to its arguments; run the graph's decompositions first")
    seed = _seed(node, this.seed) if draws(node) else None
    positional, keywords = bind(op, args, kwargs)
    positional = _with_sizes_as_numbers(op, positional)
    flat, spec = pytree.tree_flatten(asked(op, positional, node.meta.get("val")))
    outs = [Meta(this.sizes.shape(v), v.dtype) if isinstance(v, torch.Tensor) else None for v in flat]
    if this.numbers is not None:
        lifted = this.numbers.lift(op, positional)
        try:
            return pytree.tree_unflatten(list(call(op, lifted, keywords, outs, seed)), spec)
        except StaticNumbers:
            this.numbers.static.add(str(op))
            raise
    return pytree.tree_unflatten(list(call(op, positional, keywords, outs, seed)), spec)


def _with_sizes_as_numbers(op: torch._ops.OpOverload, arguments: Sequence[Any]) -> list[Any]:
    """The arguments with sizes that are left open as numbers of the program, where they take part in arithmetic."""
    declared = [a.type for a in op._schema.arguments if not a.kwarg_only]
    return [
        Lifted(jax.numpy.asarray(x, "int64"), int) if is_open_size(x) and isinstance(kind, _ARITHMETIC) else x
        for x, kind in zip(arguments, declared, strict=True)
    ]


def draws(node: torch.fx.Node) -> bool:
    """Whether a node is an operator that draws random numbers."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _seed(node: torch.fx.Node, seed: Any | None) -> tuple[Any, Any]:
    """A graph by itself has no random state; its position tells an operator's numbers from those of the others."""
    position = list(node.graph.nodes).index(node)
    start = torch.initial_seed() & (2**63 - 1) if seed is None else seed
    return jax.numpy.asarray(start, "int64"), jax.numpy.asarray(position, "int64")


def _module(node: torch.fx.Node, position: int) -> torch.fx.GraphModule:
    owner = node.graph.owning_module
    branch: Any = node.args[position]
    assert owner is not None
    return _attribute(owner, branch.target)


def arrays_of(values: Sequence[Any]) -> list[Any]:
    """Arrays, also of Python numbers."""
    return [jax.numpy.asarray(v) for v in values]


def _inner(this: _Pass) -> _Pass:
    return _Pass(sizes=this.sizes)


def _while_loop(
    node: torch.fx.Node, this: _Pass, _cond: Any, _body: Any, carried: Arrays, more: Arrays = ()
) -> list[Any]:
    condition, body = (_as_jax(_module(node, position), _inner(this)) for position in (0, 1))
    return while_loop(condition, body, carried, more)


def while_loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Arrays, more: Arrays) -> list[Any]:
    """A loop whose condition is a program too.

    Args:
        condition: Function of the carried and the further values that returns one truth value.
        body: Function of the same that returns the carried values of the next turn.
        carried: Arrays that change from turn to turn; they keep shape and dtype.
        more: Arrays that do not change.
    """
    start = tuple(arrays_of(carried))

    def turn(state: Any) -> tuple[Any, ...]:
        after = pytree.tree_leaves(body(*state, *more))
        return tuple(jax.numpy.asarray(a, s.dtype) for a, s in zip(after, state, strict=True))

    def goes_on(state: Any) -> Any:
        return jax.numpy.reshape(jax.numpy.asarray(pytree.tree_leaves(condition(*state, *more))[0]), ()).astype(bool)

    return list(jax.lax.while_loop(goes_on, turn, start))


def _cond(node: torch.fx.Node, this: _Pass, predicate: Any, _true: Any, _false: Any, operands: Arrays = ()) -> Any:
    branches = [_as_jax(_module(node, position), _inner(this)) for position in (1, 2)]
    taken = [lambda *xs, b=b: tuple(arrays_of(pytree.tree_leaves(b(*xs)))) for b in branches]
    return jax.lax.cond(jax.numpy.reshape(predicate, ()).astype(bool), *taken, *operands)


_ARITHMETIC = (torch.NumberType, torch.TensorType)
_ASSERTIONS = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
}
_HIGHER_ORDER: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.while_loop: _while_loop,
    torch.ops.higher_order.cond: _cond,
}
