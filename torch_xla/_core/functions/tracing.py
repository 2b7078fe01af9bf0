"""Traces Python functions of tensors to functional graphs, by PyTorch, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla._torch_internals import OpOverload, pytree

Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]


class ImpureError(RuntimeError, AssertionError):
    """A function with side effects where none are allowed; torch_xla 2 raises AssertionErrors there."""


@dataclass(frozen=True)
class TracedFunction:
    """A traced function: its graph, and its side effects on tensors."""

    module: torch.fx.GraphModule  # placeholders are the inputs and then `outside`; the output is a flat list
    outside: list[torch.Tensor]  # tensors that it had from elsewhere, on the device of its inputs
    written: str | None  # what it wrote to, if anything, in words; the graph leaves its inputs alone
    needs_gradient: bool  # whether one of `outside` requires a gradient


def is_tracing() -> bool:
    """Whether a function is being traced right now: what is called then becomes a part of its graph."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> TracedFunction:
    """Traces a function once, which takes the inputs one by one and may compute gradients of what it computes.

    Of the inputs only shapes, strides, dtypes and devices count.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    from torch_xla._torch_internals import enable_python_dispatcher

    bare = [x.detach() for x in inputs]
    # Functionalisation does not go over backward passes and autograd functions; their graph can be made functional.
    # The Python dispatcher knows which operators write although their schemas do not say so (batch normalisation).
    with enable_python_dispatcher():
        graph = make_fx(_flattened(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*bare)
    with torch.no_grad(), enable_python_dispatcher():
        functional = torch.func.functionalize(graph, remove="mutations_and_views")
        module = make_fx(functional, tracing_mode="fake", _allow_non_fake_inputs=True)(*bare)
    outside = _lift(module, len(bare))
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach_copy.default:
            node.replace_all_uses_with(node.args[0])
    written = _drop_writes(module, len(bare))
    device = next((x.device for x in bare if x.device.type == "xla"), None)
    moved = [value.detach().to(device) for value in outside]
    return TracedFunction(module, moved, written, any(value.requires_grad for value in outside))


def _flattened(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    def called(*values: torch.Tensor) -> list[Any]:
        return pytree.tree_leaves(function(*values))

    return called


def placeholders(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The inputs of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def results(module: torch.fx.GraphModule) -> list[Any]:
    """The results of a graph: nodes and constants."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return list(output.args[0])


def _lift(module: torch.fx.GraphModule, count: int) -> list[torch.Tensor]:
    """Makes inputs of the tensors that a graph has as attributes, and returns them."""
    inputs = placeholders(module)
    last = inputs[-1] if count else None
    outside: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = getattr(module, node.target)
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in outside:
            with module.graph.inserting_after(last) if last else module.graph.inserting_before():
                last = module.graph.placeholder(f"outside_{len(outside)}")
            last.meta["val"] = node.meta["val"]
            outside[id(value)] = (last, value)
        node.replace_all_uses_with(outside[id(value)][0])
        module.graph.erase_node(node)
    return [value for _, value in outside.values()]


def _drop_writes(module: torch.fx.GraphModule, count: int) -> str | None:
    """Takes out the copies to inputs that end a functionalised graph; says what was written to."""
    inputs = placeholders(module)[:count]
    written = None
    for node in reversed(list(module.graph.nodes)):
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        target = node.args[0]
        written = f"its argument {inputs.index(target)}" if target in inputs else "a tensor from outside"
        if node.target is torch.ops.aten.copy_.default:
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return written


@dataclass(frozen=True)
class Halves:
    """A function and its gradients as two graphs."""

    forward: torch.fx.GraphModule  # returns the function's results, then the values in `saved` that are no inputs
    backward: torch.fx.GraphModule | None  # takes the saved values and then one gradient per position in `tangents`
    outside: list[torch.Tensor]  # tensors that the function had from elsewhere: the last inputs of `forward`
    count: int  # of the function's results
    # where `backward`'s first inputs come from: ``("input", i)`` or ``("result", i)`` of `forward`
    saved: list[tuple[str, int]]
    tangents: list[int]  # results that have gradients
    grad_inputs: list[int]  # inputs, for which `backward` returns a gradient each (None where there is none)


def split(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    grad_inputs: Sequence[int],
    area: str,
    partition: Partition | None = None,
) -> Halves:
    """Traces a function once, together with its gradients, and splits the graph in two.

    It takes the inputs one by one and must write to none of them; `grad_inputs` are the positions of those whose
    gradients are needed. Without a partition all that the backward pass needs is saved. Raises ImpureError where it
    writes to an input, or needs the gradient of a tensor that it has from outside.
    """
    from torch_xla._torch_internals import default_partition

    if not grad_inputs:
        graph = trace(function, inputs)
        check(graph, area)
        return Halves(graph.module, None, graph.outside, len(results(graph.module)), [], [], [])
    count = 0
    tangents: list[int] = []

    def joint(*values: torch.Tensor) -> list[Any]:
        nonlocal count, tangents
        primals = [v.detach().requires_grad_(i in grad_inputs) for i, v in enumerate(values)]
        outs = pytree.tree_leaves(function(*primals))
        count = len(outs)
        tangents = [i for i, out in enumerate(outs) if isinstance(out, torch.Tensor) and out.requires_grad]
        # Stand-ins, which become inputs: the gradients of results that are known only now.
        tangent_inputs = [torch.empty_like(outs[i]) for i in tangents]
        grad_primals = [primals[i] for i in grad_inputs]
        grads: Sequence[Any] = ()
        if tangents:
            grads = torch.autograd.grad([outs[i] for i in tangents], grad_primals, tangent_inputs, allow_unused=True)
        return [*(o.detach() if isinstance(o, torch.Tensor) else o for o in outs), *tangent_inputs, *grads]

    with torch.enable_grad():
        graph = trace(joint, inputs)
    check(graph, area)
    module = graph.module
    flat = results(module)
    if not tangents:
        _return(module, flat[:count])
        return Halves(module, None, graph.outside, count, [], [], [])
    tangent_inputs = flat[count : count + len(tangents)]
    order = list(module.graph.nodes)
    first = min((order.index(node) for node in tangent_inputs), default=len(order))
    for position, node in enumerate(order):
        node.meta["partitioner_tag"] = "is_forward" if position < first else "is_backward"
    last = placeholders(module)[-1]
    for number, node in enumerate(tangent_inputs):
        with module.graph.inserting_after(last):
            last = module.graph.placeholder(f"tangents_{number}")
        last.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(last)
    flat = results(module)
    _return(module, [*flat[:count], *flat[count + len(tangents) :]])
    forward, backward = (partition or default_partition)(module, None, num_fwd_outputs=count)
    saved = _saved(forward, backward, count)
    return Halves(forward, backward, graph.outside, count, saved, tangents, list(grad_inputs))


def _return(module: torch.fx.GraphModule, values: Sequence[Any]) -> None:
    """Makes a graph return other values."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    output.args = (list(values),)
    module.graph.eliminate_dead_code()
    module.recompile()


def _saved(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, count: int) -> list[tuple[str, int]]:
    """The sources of the saved values; views of inputs are not saved, but computed again in the backward graph."""
    inputs = placeholders(forward)
    flat = results(forward)
    extra: list[torch.fx.Node] = []
    saved: list[tuple[str, int]] = []
    for node, placeholder in zip(flat[count:], placeholders(backward), strict=False):
        views = []
        root = node
        while torch.Tag.view_copy in getattr(root.target, "tags", ()) and root.all_input_nodes == [root.args[0]]:
            views.append(root)
            root = root.args[0]
        if root in inputs:
            saved.append(("input", inputs.index(root)))
            _view_again(backward, placeholder, root, views)
        else:
            saved.append(("result", count + len(extra)))
            extra.append(node)
    _return(forward, [*flat[:count], *extra])
    backward.recompile()
    return saved


def _view_again(module: torch.fx.GraphModule, viewed: torch.fx.Node, root: torch.fx.Node, views: Any) -> None:
    """Makes a graph take `root` instead of a view of it, which it computes itself."""
    value = viewed
    users = list(viewed.users)
    after = placeholders(module)[-1]
    for view in reversed(views):
        with module.graph.inserting_after(after):
            value = after = module.graph.call_function(view.target, (value, *view.args[1:]), dict(view.kwargs))
        value.meta["val"] = view.meta["val"]
    for user in users if views else ():
        user.replace_input_with(viewed, value)
    viewed.meta["val"] = root.meta["val"]


def check(graph: TracedFunction, area: str) -> None:
    """Refuses a function with side effects; see `split`."""
    if graph.written:
        raise ImpureError(
            message(
                area,
                f"the function writes to {graph.written}",
                expected="a function without side effects",
                do="return the new value instead, or clone the tensor first",
            )
        )
    if graph.needs_gradient and torch.is_grad_enabled():
        raise ImpureError(
            message(
                area,
                "the function uses a tensor from outside that requires a gradient",
                expected="all such tensors among its arguments",
                do="pass it, detach it, or turn gradients off",
            )
        )
