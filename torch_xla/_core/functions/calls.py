"""Runs a traced graph as a list of calls in C++, without Python between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.overrides import has_torch_function

from torch_xla import _bindings
from torch_xla._torch_internals import OpOverload

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def calls_of(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function that does what a traced graph, which does not change any more, does, in less time.

    A graph of something beside operators and functions of numbers stays as it is, and is called where a mode or a
    subclass of tensors wants to see each call in it.
    """
    try:
        translation = _CallTranslation(module)
    except _Other:
        return module
    calls, constants, output_builder = translation.calls, translation.constants, translation.output_type

    def run(*args: Any) -> Any:
        operands = (*args, *(constant(module) for constant in constants))
        results = None if has_torch_function(operands) else calls.run(operands)
        return module(*args) if results is None else output_builder(results)

    return run


class _Other(Exception):
    """A graph has a node that is no such call."""


class _CallTranslation:
    """One pass over a traced graph: `calls` are those of its nodes.

    `constants` gives those of the module, which are further inputs; `output_type` makes what it returns of a list.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        nodes = list(module.graph.nodes)
        inputs = [node for kind in ("placeholder", "get_attr") for node in nodes if node.op == kind]
        self.calls = _bindings.Calls(len(inputs))
        self.constants = [operator.attrgetter(node.target) for node in nodes if node.op == "get_attr"]
        self.output_type: Callable[[list[Any]], Any] = list
        # A slot for what is one value, a list of slots for the results of an operator that has several, or none.
        self._values: dict[torch.fx.Node, Any] = {node: _bindings.Slot(i) for i, node in enumerate(inputs)}
        for node in nodes:
            if node.op == "output":
                self._finish(node.args[0])
            elif node not in self._values:
                self._values[node] = self._called(node)

    def _called(self, node: torch.fx.Node) -> Any:
        target: Any = node.target
        if type(target) is OpOverload:
            schema = target._schema
            first = self.calls.add(
                schema.name, schema.overload_name, self._filled(node.args), self._filled(node.kwargs)
            )
            slots = [_bindings.Slot(first + i) for i in range(len(schema.returns))]
            return slots[0] if len(slots) == 1 else slots
        if target is operator.getitem:
            return self._element(*node.args)
        flat = not node.kwargs and all(isinstance(x, (torch.fx.Node, int, float)) for x in node.args)
        if node.op != "call_function" or not flat or not isinstance(node.meta.get("val"), _NUMBERS):
            raise _Other
        return _bindings.Slot(self.calls.add_number(target, self._filled(node.args)))

    def _element(self, of: Any, position: Any) -> Any:
        values = self._values[of]
        if isinstance(values, list):
            return values[position]
        schema = of.target._schema if type(of.target) is OpOverload else None
        if schema is None or not isinstance(schema.returns[0].type, torch.ListType) or type(position) is not int:
            raise _Other  # a part of a tensor, by Python
        return _bindings.Slot(self.calls.add_element(values, position))

    def _filled(self, arguments: Any) -> Any:
        return map_aggregate(arguments, lambda x: self._one(x) if isinstance(x, torch.fx.Node) else x)

    def _one(self, node: torch.fx.Node) -> Any:
        if not isinstance(self._values[node], _bindings.Slot):
            raise _Other
        return self._values[node]

    def _finish(self, outputs: Any) -> None:
        if not isinstance(outputs, Sequence) or not all(x is None or isinstance(x, torch.fx.Node) for x in outputs):
            raise _Other
        self.output_type = tuple if isinstance(outputs, tuple) else list
        self.calls.finish([None if x is None else self._one(x) for x in outputs])
