"""The part of the report on all overloads of aten."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from opdb.report import BAD, Results, cell, table
from opdb.schema_inputs import overload, written

HEADING = "## All overloads of aten\n"  # where this part of the report begins

OUTCOMES = {
    "lowered": "by a rule",
    "decomposed": "by PyTorch, into others",
    "recorder": "by the recorder alone: nothing is computed",
    "callback": "the program calls the CPU kernel",
    "cut": "on the host, between two programs",
    "layout": "its results are sparse, quantized or nested: refused",
    "refused": "no arguments were found that the CPU accepts; the device refuses too",
    "untried": "takes what no schema tells how to make",
    "fail": "something differs",
    "crash": "the process ended",
    "hang": "it did not end",
}

# Why no arguments were found, by the CPU's error or the operator's name; the first that matches.
_REASONS = (
    ("needs another device's library", r"cudnn|miopen|mps|cslt|triton|semi_structured|philox|depthwise"),
    ("needs a sparse tensor", r"sparse|coalesced|_nnz|_dim[IV]|_values|_indices|spmm|hspmm|csr|csc|bsr|bsc"),
    ("needs a quantized tensor", r"quant|q_scale|q_zero|q_per|qscheme|int_repr|fake_quant|fbgemm|int4pack|int8"),
    ("needs a nested or jagged tensor", r"nested|jagged|padded"),
    ("needs a tensor of oneDNN", r"mkldnn"),
    ("not on the CPU", r"Could not run"),
    ("ends the CPU's process", r"ends the process"),
)


def summary(results: Results) -> str:
    """A line per outcome."""
    counts = Counter(r["status"] for r in results)
    return "\n".join(f"{name:10} {counts[name]:5}  {meaning}" for name, meaning in OUTCOMES.items())


def _form(op: str) -> str:
    result = overload(op)
    names = written(result)
    if not names:
        return "functional"
    return "out=" if any(a.is_out for a in result._schema.arguments) else "in place"


def _reason(r: dict[str, Any]) -> str:
    text = f"{r['op']} {r['messages'][0] if r['messages'] else ''}"
    return next((label for label, pattern in _REASONS if re.search(pattern, text)), "arguments that go together")


def text(results: Results) -> str:
    """The part as Markdown."""
    results = sorted(results, key=lambda r: r["op"])
    forms = ("functional", "in place", "out=")
    by_form = Counter((r["status"], _form(r["op"])) for r in results)
    lines = [
        HEADING,
        f"Each of the {len(results)} overloads that PyTorch's dispatcher knows, with arguments made from its schema:",
        "by trial on the CPU, sets that its kernel accepts and sets that it refuses. Results, what is in the arguments",
        "afterwards, which of them a result shares memory with, and gradients by one tensor at a time are compared",
        "with the CPU's; what it refuses must be refused with the same type of exception, at the same line. Everything",
        "is compiled. Written by `make test-overloads`; `make test` checks a fixed sample.",
        "",
        f"{sum(r.get('accepted', 0) for r in results)} calls were accepted, "
        f"{sum(r.get('refused', 0) for r in results)} refused, and {sum(r.get('gradients', 0) for r in results)} "
        f"gradients compared, by {sum(r.get('compiled', 0) for r in results)} programs.",
        "",
        *table(
            ["outcome", "", *forms, "all"],
            [
                [name, meaning, *(str(by_form[name, f]) for f in forms), str(sum(by_form[name, f] for f in forms))]
                for name, meaning in OUTCOMES.items()
            ],
        ),
        "",
        "### No accepted arguments",
        "",
    ]
    groups: dict[str, list[str]] = {}
    for r in results:
        if r["status"] in ("refused", "untried"):
            groups.setdefault(_reason(r) if r["status"] == "refused" else r["messages"][0], []).append(r["op"])
    lines += table(
        ["reason", "overloads", ""],
        [[k, str(len(v)), ", ".join(f"`{o.removeprefix('aten.')}`" for o in v)] for k, v in sorted(groups.items())],
    )
    lines += ["", "### On the host", ""]
    for status in ("callback", "cut"):
        names = [f"`{r['op'].removeprefix('aten.')}`" for r in results if r["status"] == status]
        lines += [f"*{status}*: {', '.join(names)}", ""]
    lines += [
        "### Lowerings that raised",
        "",
        "The program calls the CPU kernel instead, or there is nothing to compute.",
        "",
    ]
    raised = sorted({text for r in results for text in r.get("raised", ())})
    lines += table(["operator", "raised"], [cell(t).split(": ", 1) for t in raised]) if raised else ["None."]
    lines += ["", "### Differences that are accepted", ""]
    known: dict[str, set[str]] = {}
    for r in results:
        for reason in r.get("known", ()):
            known.setdefault(reason, set()).add(r["op"].removeprefix("aten."))
    lines += table(
        ["reason", "overloads", ""],
        [[cell(k), str(len(v)), ", ".join(f"`{o}`" for o in sorted(v)[:12])] for k, v in sorted(known.items())],
    )
    lines += ["", "### Overloads that differ", ""]
    bad = [r for r in results if r["status"] in BAD]
    rows = [[r["op"].removeprefix("aten."), r["status"], cell(" ".join(r["messages"])[:240])] for r in bad]
    lines += table(["overload", "", "what differs"], rows) if rows else ["None."]
    return "\n".join(lines) + "\n"
