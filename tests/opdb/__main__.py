"""The command: runs the sweep, keeps its results, writes the report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from opdb import cases, overload_report, overloads, report, runner

_ROOT = Path(__file__).resolve().parent.parent.parent
_FAST_COMPILE = "--xla_backend_optimization_level=0"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="opdb", description="Compares every operator with PyTorch's CPU kernels.")
    parser.add_argument("--ops", nargs="*", help="regular expressions over operator names")
    parser.add_argument("--dtypes", nargs="*", default=[], choices=list(cases.DTYPES))
    parser.add_argument("--kinds", nargs="*", default=[], choices=cases.KINDS)
    parser.add_argument("--overloads", action="store_true", help="check all overloads of aten instead")
    parser.add_argument("--only", choices=("failed", "missing"), help="jobs that failed, or have no result yet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds a job may take")
    parser.add_argument("--optimize", action="store_true", help="compile as users do; takes half as long again")
    parser.add_argument("--results", type=Path, help="file of results; else one in build/opdb")
    parser.add_argument("--report", type=Path, default=_ROOT / "docs/op-coverage.md")
    parser.add_argument("--failures", type=Path, help="file for {operator: {dtype/kind: message}}")
    parser.add_argument("--no-run", action="store_true", help="only write the report of the results kept")
    args = parser.parse_args()
    if args.results is None:
        args.results = _ROOT / "build/opdb" / ("overloads.jsonl" if args.overloads else "results.jsonl")
    return args


def load(path: Path) -> dict[cases.Job, dict[str, Any]]:
    """The results kept in a file; a later one replaces an earlier one of the same job."""
    if not path.exists():
        return {}
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {cases.Job(r["op"], r["dtype"], r["kind"]): r for r in results}


def updated(old: str, part: str, overloads_run: bool) -> str:
    """The report with one of its two parts replaced: each run has the results of one of them only."""
    database, heading, rest = old.partition(overload_report.HEADING)
    return database.rstrip() + "\n\n" + part if overloads_run else part + (f"\n{heading}{rest}" if heading else "")


def main() -> int:
    """Runs the command; 1 if a job failed."""
    args = _arguments()
    jobs = overloads.jobs(args.ops) if args.overloads else cases.jobs(args.ops, args.dtypes, args.kinds)
    results = load(args.results)
    if args.only == "failed":
        jobs = [j for j in jobs if j in results and results[j]["status"] in report.BAD]
    elif args.only == "missing":
        jobs = [j for j in jobs if j not in results]
    if not args.no_run:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        if not args.optimize:  # for the workers
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST_COMPILE}"
        with (
            args.results.open("a") as file,
            tqdm(total=len(jobs), unit="job", disable=not sys.stderr.isatty()) as progress,
        ):

            def done(result: dict[str, Any]) -> None:
                file.write(json.dumps(result) + "\n")
                file.flush()
                results[cases.Job(result["op"], result["dtype"], result["kind"])] = result
                progress.update()
                if result["status"] in report.BAD:
                    line = f"{result['op']} {result['dtype']} {result['kind']}: {result['status']}"
                    progress.write(f"{line}: {result['messages'][0][:160]}", file=sys.stderr)

            runner.run(jobs, args.workers, args.limit, done)
    if args.failures:
        args.failures.write_text(json.dumps(report.failures(results.values()), indent=1))
    part = (overload_report if args.overloads else report).text(results.values())
    args.report.parent.mkdir(parents=True, exist_ok=True)
    old = args.report.read_text() if args.report.exists() else ""
    args.report.write_text(updated(old, part, args.overloads))
    print((overload_report if args.overloads else report).summary(results.values()))
    return int(any(results[j]["status"] in report.BAD for j in jobs if j in results))


if __name__ == "__main__":
    sys.exit(main())
