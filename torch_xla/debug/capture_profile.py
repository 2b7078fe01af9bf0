"""Collects profiles from profiler servers, for TensorBoard.

    python -m torch_xla.debug.capture_profile --service_addr localhost:9012 --logdir /tmp/profile --duration_ms 5000

The program that is profiled has called `torch_xla.debug.profiler.start_server` with that port.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from torch_xla.debug import profiler


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_xla.debug.capture_profile", description="Collect profiles from profiler servers."
    )
    parser.add_argument("--service_addr", required=True, help="addresses of the servers, host:port, with commas")
    parser.add_argument("--logdir", required=True, help="folder for the profiles; TensorBoard reads it")
    parser.add_argument("--duration_ms", type=int, default=10000, help="how long to collect, in milliseconds")
    parser.add_argument("--timeout_s", type=int, default=120, help="how long to wait for servers that do not answer")
    parser.add_argument("--start_time", type=float, default=0.0, help="seconds to wait before the first profile")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--interactive", choices=("once", "loop"), help="ask before the profile, or before each of many")
    mode.add_argument(
        "--automatic", type=int, nargs=2, metavar=("COUNT", "GAP"), help="several profiles, with seconds between them"
    )
    return parser


def _turns(options: argparse.Namespace) -> Iterator[None]:
    """One item per profile, when it is time for it."""
    time.sleep(options.start_time)
    if options.interactive:
        while input("Enter starts a profile, q ends: ").strip().lower() not in ("q", "quit"):
            yield
            if options.interactive == "once":
                return
        return
    count, gap = options.automatic or (1, 0)
    for turn in range(count):
        if turn:
            time.sleep(gap)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    try:
        for _ in _turns(options):
            profiler.trace(options.service_addr, options.logdir, options.duration_ms, timeout_s=options.timeout_s)
            print(f"profile written below {options.logdir}", flush=True)
    except (RuntimeError, ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
