"""Says why a graph is compiled again: what differs first from the nearest graph that ran from the same line.

The barrier passes each new graph here, before it is lowered. The first graph of a line is a warm-up and says nothing;
each further one that resembles an earlier one becomes a `Retrace`, such as ``input 0 is f32[8,4], was f32[7,4]``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch

from torch_xla import _bindings, _events, _notices
from torch_xla._core.device import memory_stats
from torch_xla._core.graph.graph import Graph, Input, Node, Number
from torch_xla._errors import GraphLimitError, message
from torch_xla.ops.registry import Meta

# How many graphs are remembered: of one line, and of all lines by their nodes.
_PER_LINE = 8
_NODES = 50_000
# How many differences one retrace lists, and how many operators the alignment looks at.
_SHOWN = 8
_ALIGNED = 2000
# Two graphs with fewer operators in common, as a fraction, are different programs: at their beginnings and ends, or
# wherever they are, as where a model skips some of its layers.
_ALIKE = 0.5
_ALIKE_ANYWHERE = 0.75
# How many lengths of an input are seen before a remedy is proposed.
_LENGTHS = 3
_GROWS = (
    'make it as long as it becomes at once (with transformers: generate(…, cache_implementation="static")), or let it '
    "grow by buckets"
)
_NO_LINE = "a thread without Python code"
# The graph of a line that tells that they keep changing; the second often differs from a first step alone.
_CHANGING = 3
_NOTHING = "nothing that is recorded: a setting of PyTorch or XLA changed, or its program was dropped"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a graph differs from a known one.

    Attributes:
        kind: ``"input"``, ``"constant"``, ``"inserted"``, ``"removed"``, ``"result"``, ``"wiring"``, ``"outputs"``,
            ``"donation"`` or ``"numbers"``.
        text: What it is, in words.
        frame: The user's line that made it, ``file:line in function``, if known.
    """

    kind: str
    text: str
    frame: str | None = None

    def __str__(self) -> str:
        if self.frame is None:
            return self.text
        return f"{self.text} ({'made at ' if self.kind == 'input' else ''}{self.frame})"


@dataclass(frozen=True, slots=True)
class Retrace:
    """A graph that was compiled although a similar one was known.

    Attributes:
        line: The user's line that asked for it: a barrier or a read, ``file:line in function``.
        name: Name of the region given to `torch_xla.compile`, if any.
        key: The graph's structural key, 32 hexadecimal digits.
        nearest: That of the graph it is compared with.
        count: How many different graphs the line has had, this one included.
        differences: What differs, the first cause first; at most eight.
    """

    line: str
    name: str | None
    key: str
    nearest: str
    count: int
    differences: tuple[Difference, ...]

    @property
    def reason(self) -> str:
        """The first difference in words."""
        return str(self.differences[0]) if self.differences else _NOTHING

    def __str__(self) -> str:
        subject = f"graph {self.name}" if self.name else "a graph"
        more = len(self.differences) - 1
        rest = f"; and {more} more" if more > 0 else ""
        return f"compiling {subject} again at {self.line} (number {self.count} there): {self.reason}{rest}"


@dataclass(slots=True)
class _CallSite:
    graphs: deque[Graph] = field(default_factory=lambda: deque(maxlen=_PER_LINE))
    count: int = 0
    reports: int = 0
    advised: bool = False  # that something of it grows
    uncompiled: Graph | None = None  # the latest that ran operator by operator, of the first three


# By line and device: each device has programs of its own.
_lines: OrderedDict[tuple[str, int], _CallSite] = OrderedDict()
_records: deque[Retrace] = deque(maxlen=1000)
_guards: list[str] = []
expected: ContextVar[bool] = ContextVar("new graphs are expected", default=False)


def note_uncompiled(line: str | None, device: int, count: int, describe: Callable[[], Graph]) -> None:
    """Takes notice of a new graph that is about to run operator by operator; tells of the third one of a line.

    `count` is how many different graphs the user's line has had so, this one included; `describe` is called only where
    the graph is looked at. Raises GraphLimitError where new graphs are forbidden.
    """
    if not _guards and not 1 < count <= _CHANGING:
        return
    graph = describe()
    line = line or _NO_LINE
    history = _lines.setdefault((line, device), _CallSite())
    others = [*history.graphs, history.uncompiled] if history.uncompiled is not None else [*history.graphs]
    nearest = nearest_of(graph, others)
    differences = compare(graph, nearest) if nearest is not None else []
    reason, brief = (str(differences[0]), differences[0].text) if differences else ("they are unlike each other",) * 2
    if _guards:
        _refuse(f"a graph at {line} is new: {reason}")
    history.uncompiled = graph
    if count == _CHANGING and not expected.get():
        text = (
            f"graphs at {line} keep changing: {reason}; each runs operator by operator, uncompiled, until one repeats"
        )
        _notices.advise("retrace", None, text, f"graphs at {_notices.short(line)} keep changing: {brief}")


def _refuse(reason: str) -> None:
    raise GraphLimitError(
        message(
            "retrace",
            reason,
            expected=f"no new graph since {_guards[-1]}",
            do="keep shapes and constants the same, or pad them",
        )
    )


def note(graph: Graph, line: str | None, name: str | None, known_before: bool = False) -> Retrace | None:
    """Takes notice of a graph that is about to be compiled; gives why again, None for the first one of its kind.

    `line` is the user's that asked for it, `name` that of the region, if any; one that is `known_before` ran already,
    operator by operator. Raises GraphLimitError where new graphs are forbidden.
    """
    if _bindings.is_eager():  # every operator is a graph
        return None
    line = line or _NO_LINE
    place = line, graph.device
    history = _lines.setdefault(place, _CallSite())
    nearest = nearest_of(graph, history.graphs)
    record = None
    if nearest is not None:
        record = Retrace(line, name, graph.key, nearest.key, history.count + 1, tuple(compare(graph, nearest)))
    if _guards and not known_before:
        _refuse(str(record) if record else f"compiling a graph at {line}, which is like none that ran from there")
    loops = tuple((run.count, run.period) for run in graph.layers)
    _events.mark("compile", graph.key, len(graph.nodes), line, name, record, history.count, loops)
    history.count += 1
    history.graphs.append(graph)
    _lines.move_to_end(place)
    _forget()
    if record is not None:
        _records.append(record)
        _tell(record, history, nearest)
    return record


def _forget() -> None:
    nodes = sum(len(graph.nodes) for line in _lines.values() for graph in line.graphs)
    while nodes > _NODES and len(_lines) > 1:
        _, dropped = _lines.popitem(last=False)
        nodes -= sum(len(graph.nodes) for graph in dropped.graphs)


def _tell(retrace: Retrace, line: _CallSite, nearest: Graph | None) -> None:
    if expected.get():
        return
    line.reports += 1
    # The first three of a line, then the tenth, the hundredth, …
    is_due = line.reports <= 3 or (line.reports >= 10 and str(line.reports).strip("0") == "1")
    if is_due:
        more = "" if line.reports < 3 else "; the others of this line are in torch_xla.debug.retrace.records()"
        where = _notices.short(retrace.line)
        brief = f"compiling again at {where}: {retrace.differences[0].text if retrace.differences else _NOTHING}"
        _notices.advise("retrace", None, f"{retrace}{_remedy(line, nearest)}{more}", brief)


def _remedy(line: _CallSite, nearest: Graph | None) -> str:
    """The remedy, if the latest graph and others differ in one length of an input."""
    graphs = line.graphs
    latest = graphs[-1]
    pairs = zip(latest.leaves, nearest.leaves if nearest is not None else [], strict=False)
    leaf, new, old = next(((i, new, old) for i, (new, old) in enumerate(pairs) if new != old), (0, None, None))
    if new is None or old is None or new.dtype != old.dtype or len(new.shape) != len(old.shape):
        return ""
    dims = [dim for dim, (a, b) in enumerate(zip(new.shape, old.shape, strict=True)) if a != b]
    if len(dims) != 1:
        return ""
    (dim,) = dims
    same = [
        meta.shape
        for meta in (graph.leaves[leaf] for graph in graphs if leaf < len(graph.leaves))
        if meta is not None and len(meta.shape) == len(new.shape)
    ]
    lengths = sorted({s[dim] for s in same if s[:dim] + s[dim + 1 :] == new.shape[:dim] + new.shape[dim + 1 :]})
    if len(lengths) < _LENGTHS:
        return ""
    if lengths[-_LENGTHS:] == [s[dim] for s in same[-_LENGTHS:]] and lengths[-_LENGTHS] == lengths[-1] - _LENGTHS + 1:
        if line.advised:
            return ""
        line.advised = True
        return f"; input {leaf} is one longer each time: {_GROWS}"
    sizes = sorted({1 << max(length - 1, 0).bit_length() for length in lengths})
    buckets = sizes if dim == 1 else f"Buckets({sizes}, dim={dim})"
    return f"; lengths {', '.join(map(str, lengths))} came: MpDeviceLoader(…, pad_to={buckets}) makes them {len(sizes)}"


def records() -> list[Retrace]:
    """The retraces so far, oldest first; the latest 1,000."""
    return list(_records)


def clear() -> None:
    """Forgets what was compiled, and why."""
    _lines.clear()
    _records.clear()


def forbid(line: str) -> None:
    """Makes a new graph an error, raised before it is compiled; `line` is where that was asked."""
    _guards.append(line)


def allow(line: str) -> None:
    """Takes a `forbid` back."""
    _guards.remove(line)


def nearest_of(graph: Graph, earlier: Sequence[Graph] | deque[Graph]) -> Graph | None:
    """The known graph with most in common, or None if none is similar."""
    best, score = None, 0.0
    for other in reversed(earlier):
        similarity = _similarity(graph, other)
        if similarity > score:
            best, score = other, similarity
    return best if score >= _ALIKE else None


def _similarity(a: Graph, b: Graph) -> float:
    """The share of the longer graph's operators that both have; equal inputs break ties."""
    longest = max(len(a.nodes), len(b.nodes), 1)
    similarity = sum(_common(a.nodes, b.nodes)) / longest
    if similarity < _ALIKE:
        shared = Counter(node.op for node in a.nodes) & Counter(node.op for node in b.nodes)
        anywhere = shared.total() / longest
        similarity = anywhere if anywhere >= _ALIKE_ANYWHERE else similarity
    same_inputs = sum(x == y for x, y in zip(a.leaves, b.leaves, strict=False)) / max(len(a.leaves), len(b.leaves), 1)
    return similarity + same_inputs * 1e-3


def _common(a: Sequence[Node], b: Sequence[Node]) -> tuple[int, int]:
    shortest = min(len(a), len(b))
    start = 0
    while start < shortest and a[start].op == b[start].op:
        start += 1
    end = 0
    while end < shortest - start and a[-1 - end].op == b[-1 - end].op:
        end += 1
    return start, end


def compare(graph: Graph, earlier: Graph) -> list[Difference]:
    """The differences of a graph from an earlier one, causes before effects, eight at most."""
    start, end = _common(graph.nodes, earlier.nodes)
    if start + end < max(len(graph.nodes), len(earlier.nodes)):
        return _operators(graph, earlier, start, end)[:_SHOWN]
    differences = (
        [*_inputs(graph, earlier), *_constants(graph, earlier)]
        or [*_results(graph, earlier), *_edges(graph, earlier)]
        or _outputs(graph, earlier)
        or _donation(graph, earlier)
        or (_numbers(graph, earlier) if graph.numbers != earlier.numbers else [])
    )
    return differences[:_SHOWN]


def _operators(graph: Graph, earlier: Graph, start: int, end: int) -> list[Difference]:
    new, old = graph.nodes[start : len(graph.nodes) - end], earlier.nodes[start : len(earlier.nodes) - end]
    if len(new) + len(old) > _ALIGNED:
        new, old = new[: _ALIGNED // 2], old[: _ALIGNED // 2]
    differences = []
    matcher = SequenceMatcher(a=[n.op for n in old], b=[n.op for n in new], autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        if i2 > i1:
            differences.append(Difference("removed", f"{_ops(old[i1:i2])} no longer recorded", _frame(old[i1:i2])))
        if j2 > j1:
            differences.append(Difference("inserted", f"{_ops(new[j1:j2])} recorded anew", _frame(new[j1:j2])))
    return differences


def _ops(nodes: Sequence[Node]) -> str:
    names = [node.op.removesuffix(".default") for node in nodes[:3]]
    more = len(nodes) - 3
    rest = f" and {more} more operator{'' if more == 1 else 's'}" if more > 0 else ""
    return ", ".join(names) + rest


def _frame(nodes: Sequence[Node]) -> str | None:
    return next((node.frame for node in nodes if node.frame), None)


def _leaf_frame(graph: Graph, leaf: int) -> str | None:
    return graph.leaf_frames[leaf] if leaf < len(graph.leaf_frames) else None


def _show(meta: Meta | None) -> str:
    return "none" if meta is None else memory_stats.kind_of(meta.shape, meta.dtype)


def _inputs(graph: Graph, earlier: Graph) -> list[Difference]:
    differences = []
    for i, (new, old) in enumerate(zip(graph.leaves, earlier.leaves, strict=False)):
        if new != old:
            frame, before = _leaf_frame(graph, i), _leaf_frame(earlier, i)
            user = next((n for n in graph.nodes if any(w.leaf and w.slot == i for w in n.inputs)), None)
            used = f", read by {_ops([user])}" if user is not None else ""
            origin = f" (made at {before})" if frame and before and frame != before else ""
            text = f"input {i} went from {_show(old)}{origin} to {_show(new)}{used}"
            differences.append(Difference("input", text, frame or (user.frame if user is not None else None)))
    if not differences and len(graph.leaves) != len(earlier.leaves):
        more = len(graph.leaves) > len(earlier.leaves)
        change = (
            "what was one tensor in two places is two tensors now" if more else "two tensors are one and the same now"
        )
        text = f"{len(graph.leaves)} inputs instead of {len(earlier.leaves)}: {change}"
        differences.append(Difference("input", text))
    return differences


def _constants(graph: Graph, earlier: Graph) -> list[Difference]:
    differences = []
    for new, old in zip(graph.nodes, earlier.nodes, strict=True):
        for position, (a, b) in enumerate(zip(new.args, old.args, strict=False)):
            if _as_key(a) != _as_key(b):
                kinds = _kinds(b, a)
                change = f"from {_in_words(b)}{kinds[0]} to {_in_words(a)}{kinds[1]}"
                text = f"argument {position} of {_ops([new])} went {change}"
                differences.append(Difference("constant", text + _outlook(a, b), new.frame))
    return differences


def _outlook(new: Any, old: Any) -> str:
    """What a changed number means for later graphs, in words."""
    became_input = isinstance(new, Number) and not isinstance(old, Number)
    return "; it is an input of the program from now on" if became_input else ""


def _value(arg: Any) -> Any:
    return arg.value if isinstance(arg, Number) else arg


def _kinds(*args: Any) -> list[str]:
    """The types of two numbers in words; empty if they are equal."""
    types = [type(_value(arg)) for arg in args]
    has_mixed_types = len(set(types)) > 1 and all(kind in (bool, int, float, complex) for kind in types)
    return [f" ({kind.__name__})" if has_mixed_types else "" for kind in types]


def _as_key(arg: Any) -> str:
    """An argument's part of a graph's key: of a number that is an input only the type."""
    return type(arg.value).__name__ if isinstance(arg, Number) else _in_words(arg)


def _in_words(arg: Any) -> str:
    if isinstance(arg, Input):
        return "a tensor"
    if isinstance(arg, list) and any(isinstance(each, Input) for each in arg):
        is_tensor_list = len(arg) > 1 and all(isinstance(each, Input) for each in arg)
        return f"{len(arg)} tensors" if is_tensor_list else f"[{', '.join(map(_in_words, arg))}]"
    return str(arg).removeprefix("torch.") if isinstance(arg, torch.dtype) else repr(_value(arg))


def _results(graph: Graph, earlier: Graph) -> list[Difference]:
    return [
        Difference(
            "result",
            f"{_ops([new])} gives {', '.join(map(_show, new.outs))} instead of {', '.join(map(_show, old.outs))}",
            new.frame,
        )
        for new, old in zip(graph.nodes, earlier.nodes, strict=True)
        if new.outs != old.outs
    ]


def _edges(graph: Graph, earlier: Graph) -> list[Difference]:
    return [
        Difference("wiring", f"{_ops([new])} reads other tensors than before", new.frame)
        for new, old in zip(graph.nodes, earlier.nodes, strict=True)
        if new.inputs != old.inputs
    ]


def _outputs(graph: Graph, earlier: Graph) -> list[Difference]:
    new, old = set(graph.outputs), set(earlier.outputs)
    differences = []
    for slot, _ in sorted(new - old):
        text = f"the result of {_ops([graph.nodes[slot]])} is kept over the barrier"
        differences.append(Difference("outputs", f"{text}, before it was not", graph.nodes[slot].frame))
    for slot, _ in sorted(old - new):
        text = f"the result of {_ops([earlier.nodes[slot]])} is no longer kept over the barrier"
        differences.append(Difference("outputs", text, earlier.nodes[slot].frame))
    if not differences and graph.outputs != earlier.outputs:
        differences = [Difference("outputs", "results are needed in another order")]
    return differences


def _numbers(graph: Graph, earlier: Graph) -> list[Difference]:
    """The first number that was one with others and is not equal to them any more."""
    owners = [(node, number) for node in graph.nodes for number in node.number_inputs()]
    first: dict[tuple[type, int], tuple[int, Number]] = {}
    for (node, number), new, old in zip(owners, graph.numbers, earlier.numbers, strict=True):
        if number is None:
            continue
        place, other = first.setdefault((type(number.value), old), (new, number))
        if place != new:
            text = f"numbers of {_ops([node])} that were equal are {other.value} and {number.value}"
            return [Difference("numbers", f"{text}; each is an input of its own from now on", node.frame)]
    return []


def _donation(graph: Graph, earlier: Graph) -> list[Difference]:
    retained = sorted(set(earlier.donated) - set(graph.donated))
    freed = sorted(set(graph.donated) - set(earlier.donated))
    if not retained and not freed:
        return []
    leaf = (retained or freed)[0]
    change = "is still held by another tensor, before it was not" if retained else "is no longer held by another tensor"
    text = f"the old value of input {leaf}, {_show(graph.leaves[leaf])}, {change}"
    return [Difference("donation", text, _leaf_frame(graph, leaf))]
