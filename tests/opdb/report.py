"""The report: what passes, by family, and everything that does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from opdb import cases, check, tolerances

BAD = ("fail", "crash", "hang")
_GOOD = ("pass", "callback", "cut")

Results = Collection[dict[str, Any]]


def failures(results: Results) -> dict[str, dict[str, str]]:
    """Messages of all jobs that failed: {operator: {dtype/kind: message}}."""
    actual: dict[str, dict[str, str]] = {}
    for r in sorted(results, key=lambda r: (r["op"], r["dtype"], r["kind"])):
        if r["status"] in BAD:
            actual.setdefault(r["op"], {})[f"{r['dtype']}/{r['kind']}"] = f"{r['status']}: {' || '.join(r['messages'])}"
    return actual


def _share(results: Results) -> str:
    ran = [r for r in results if r["status"] != "skip"]
    good = sum(r["status"] in _GOOD for r in ran)
    return f"{good} of {len(ran)} ({100 * good / len(ran):.1f} %)" if ran else "none ran"


def _targets(results: Results) -> list[tuple[str, str, str]]:
    forward = [r for r in results if r["kind"] == "forward"]
    rows = [(f"values, {d}", "≥ 99 %", _share([r for r in forward if r["dtype"] == d])) for d in
            ("float32", "int64", "bool")]  # fmt: skip
    rows.append(("values, all dtypes", "≥ 97 %", _share(forward)))
    for kind, target in (("gradient", "≥ 98 %"), ("inplace", ""), ("out", ""), ("error", "")):
        rows.append((kind, target, _share([r for r in results if r["kind"] == kind])))
    elsewhere = [r for r in results if r["kind"] == "platform"]
    rows.append((f"lowered for {' and '.join(check.PLATFORMS)}", "", _share(elsewhere)))
    ran = {r["op"] for r in forward if r["status"] != "skip"}
    called = {r["op"] for r in forward if r["status"] == "callback"}
    if ran:
        good = len(ran - called)
        rows.append(
            ("operators lowered without a callback", "≥ 97 %", f"{good} of {len(ran)} ({100 * good / len(ran):.1f} %)")
        )
    counts = Counter(r["status"] for r in results)
    rows += [(f"{name}", "0", str(counts[name])) for name in ("crash", "hang")]
    slow = [r for r in forward if r.get("seconds", 0) > check.SLOW]
    rows.append((f"first use over {check.SLOW:g} s", "0", str(len(slow))))
    return rows


def summary(results: Results) -> str:
    """A line per target."""
    return "\n".join(
        f"{name:24} {measured}" + (f"   target {target}" if target else "")
        for name, target, measured in _targets(results)
    )


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A table of Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _by(results: Results, key: Any) -> list[list[str]]:
    groups: dict[str, Counter[str]] = {}
    for r in results:
        groups.setdefault(key(r), Counter())[r["status"]] += 1
    return [
        [name, *(str(c[s]) for s in _GOOD), str(sum(c[s] for s in BAD)), str(c["skip"])]
        for name, c in sorted(groups.items())
    ]


def cell(text: str) -> str:
    """Text for a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _on_the_device(results: Results) -> list[str]:
    """Names of what never needed the host: what the site's search finds of them."""
    statuses: dict[str, set[str]] = {}
    for r in results:
        statuses.setdefault(r["op"].split("|")[0], set()).add(r["status"])
    names = sorted(name for name, actual in statuses.items() if "pass" in actual and actual <= {"pass", "skip"})
    return ["", "## On the device", "", ", ".join(f"`{name}`" for name in names) + "."]


def text(results: Results) -> str:
    """The report as Markdown."""
    results = sorted(results, key=lambda r: (r["op"], r["kind"], r["dtype"]))
    columns = ["pass", "callback", "cut", "fail", "skip"]
    lines = [
        "# Operator coverage",
        "",
        "Every entry of PyTorch's operator database (`op_db`), compared with PyTorch's CPU kernels: values, shapes",
        "and dtypes for eight dtypes; gradients for floating-point dtypes; in-place and `out=` forms for float32 and",
        "float64; and the calls that must be refused. The kind *platform* lowers each operator and its gradient for",
        "NVIDIA GPUs and TPUs, which needs neither and runs nothing. Written by `make test-ops`; `make test` runs a",
        "fixed sample. A *job* is one operator, dtype and kind. *pass*: lowered by a rule or by PyTorch's",
        "decomposition; *callback*: the program calls PyTorch's CPU kernel; *cut*: a part was computed between two",
        "programs, because a result's shape depends on values.",
        "",
        *table(["", "target", "measured"], [list(row) for row in _targets(results)]),
        "",
        "## By family",
        "",
        *table(["family", *columns], _by(results, lambda r: cases.family(r["op"]))),
        "",
        "## By kind and dtype",
        "",
        *table(["kind, dtype", *columns], _by(results, lambda r: f"{r['kind']}, {r['dtype']}")),
        "",
        "## On the host",
        "",
        "Operators of the database that needed the host, and which ATen operators ran there.",
        "",
    ]
    hosts: dict[str, set[str]] = {}
    for r in results:
        if r["status"] in ("callback", "cut"):
            hosts.setdefault(f"{cell(r['op'])} | {r['status']}", set()).update(r["host_ops"])
    rows = [[*name.rsplit(" | ", 1), ", ".join(f"`{o}`" for o in sorted(ops))] for name, ops in sorted(hosts.items())]
    lines += table(["operator", "how", "on the host"], rows)
    lines += _on_the_device(results)
    lines += ["", "## Values not compared one by one", ""]
    lines += table(
        ["operators", "compared", "reason"],
        [[f"`{cell(e.ops)}`", tolerances.LOOSE_KINDS[e.kind], e.reason] for e in tolerances.LOOSE],
    )
    lines += ["", "## Skipped", ""]
    skipped: dict[tuple[str, str], list[str]] = {}
    for r in results:
        if r["status"] == "skip":
            skipped.setdefault((r["op"], r["messages"][0]), []).append(f"{r['dtype']}/{r['kind']}")
    lines += (
        table(["operator", "jobs", "reason"], [[cell(o), ", ".join(j), cell(m)] for (o, m), j in skipped.items()])
        if skipped
        else ["Nothing."]
    )
    lines += ["", "## Failures", ""]
    failed = [
        [cell(o), key, cell(message[:240])] for o, jobs in failures(results).items() for key, message in jobs.items()
    ]
    lines += table(["operator", "dtype/kind", "what differs"], failed) if failed else ["None."]
    slow = [r for r in results if r["kind"] == "forward" and r.get("seconds", 0) > check.SLOW]
    if slow:
        lines += ["", "## Slow first use", ""]
        lines += table(
            ["operator", "dtype", "seconds"], [[cell(r["op"]), r["dtype"], f"{r['seconds']:.1f}"] for r in slow]
        )
    return "\n".join(lines) + "\n"
