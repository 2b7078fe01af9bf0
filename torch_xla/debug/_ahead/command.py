"""The command: its options, the script that it runs, what becomes of its files, and the report at the end."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch_xla import _bindings, _config, _events
from torch_xla._core.device import client, described, environment
from torch_xla._core.job import session
from torch_xla._core.lower import scopes
from torch_xla._errors import message, one_line
from torch_xla.debug._ahead import alone, text, unwritten
from torch_xla.debug._ahead.collect import Collector, Enough
from torch_xla.debug._ahead.report import Report

_USAGE = "python -m torch_xla.ahead --topology v5e:4x4 [options] script.py [its options]"


def _positive(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(value)
    return number


def _parser(inside: bool) -> argparse.ArgumentParser:
    """The options; `inside` those that stand behind the topology in the environment."""
    parser = argparse.ArgumentParser(
        prog=_config.XLA_AHEAD.name if inside else "python -m torch_xla.ahead",
        usage=None if inside else _USAGE,
        description="Runs a script as a TPU slice would have it, on a machine without one: its programs are compiled, "
        "and nothing is computed.",
        epilog="exit code: 0 where all programs fit, 1 where one does not or the script failed, 2 for wrong options",
        add_help=not inside,
        allow_abbrev=False,
    )
    if inside:
        parser.add_argument("topology")
    else:
        parser.add_argument("--topology", metavar="NAME", help="of a slice, such as v5e:8x8 or v5p:4x4x4")
        parser.add_argument("--topologies", action="store_true", help="lists the chips, and what is known of them")
    parser.add_argument("--barriers", type=_positive, metavar="N", help="ends the script after so many; else after "
                        "eight or more, once three in a row had no new program")  # fmt: skip
    parser.add_argument("--world", type=_positive, metavar="N", help="makes the script one of so many processes")
    parser.add_argument("--rank", type=int, metavar="R", help="which of a job's processes it is; the first by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the report there too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="writes it as a page, with pictures of memory")
    if not inside:
        kept = "keeps the programs there, where XLA_PERSISTENT_CACHE_PATH finds them"
        parser.add_argument("--cache", type=Path, metavar="DIR", help=kept)
    parser.add_argument("--write", action="store_true", help="writes files that the script saves, with zeros in them")
    if not inside:
        parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module in place of a script")
        parser.add_argument("script", nargs=argparse.REMAINDER, help="the script, and its options")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; gives its exit code."""
    parser = _parser(inside=False)
    options = parser.parse_args(arguments)
    if options.topologies:
        print(text.topologies())
        return 0
    program = options.module if options.module is not None else options.script
    if not options.topology or not program:
        parser.error("give a topology and a script; --topologies lists the former")
    if client.client_started():
        parser.error("this process uses the xla device already")
    inside = [options.topology, *(["--write"] if options.write else [])]
    for name in ("barriers", "world", "rank", "json", "html"):
        if (value := getattr(options, name)) is not None:
            inside += [f"--{name}", os.path.abspath(value) if isinstance(value, Path) else str(value)]
    kind = described.platform_of(options.topology).upper()
    settings = {_config.XLA_AHEAD.name: shlex.join(inside), _config.PJRT_DEVICE.name: kind}
    others = _config.XLA_HLO_DEBUG.name, _config.XLA_PERSISTENT_CACHE_PATH.name
    with _config.variables_kept(*settings, *others):
        os.environ.update(settings)  # which processes that the script starts have too
        if options.cache is not None:
            os.environ[_config.XLA_PERSISTENT_CACHE_PATH.name] = os.path.abspath(options.cache)
        else:  # it says which module a value is of, and makes another program
            os.environ.setdefault(_config.XLA_HLO_DEBUG.name, "1")
            scopes.install()
        try:
            if options.module is None and not os.path.isfile(program[0]):
                raise ValueError(message("ahead", f"found no script {program[0]}", do="name one, or -m and a module"))
            watching = _watch(program[0])
            described.devices()
            client.publish_count()  # that at import was of the devices that are here
            if client.spmd() and options.world is None:
                environment.stand_for(described.hosts(), 1)
        except (ValueError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return 2
        return _run(watching, list(program), options.module is not None)


def _run(watching: _Watching, program: list[str], is_module: bool) -> int:
    sys.argv = program
    code = 0
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except Enough:
        pass
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = 1
        watching.report.failed = one_line(error)[:400]
        if watching.report.fits:  # else the report says it
            traceback.print_exception(error)
    watching.finish(sys.stdout)
    return code if watching.report.fits else 1


class _Watching:
    """A report in the making."""

    def __init__(self, options: Any, script: str) -> None:
        compiler = f"JAX {version('jax')}"
        if described.platform() == "tpu" and importlib.util.find_spec("libtpu") is not None:
            compiler = f"libtpu {version('libtpu')}, {compiler}"
        self.report = Report(script, options.topology, 0, 1, 0, compiler)
        self._options = options
        self._sink = Collector(self.report, options.barriers)
        self._finished = False
        _events.listen(self._sink)
        alone.install()
        environment.choose_rank(options.rank or 0)
        if options.world is not None:
            environment.stand_for(options.world, min(options.world, len(described.devices()) // described.hosts()))
        if not options.write:
            unwritten.keep(self.report.unwritten)

    def finish(self, out: Any) -> None:
        """Writes the report, once."""
        if self._finished:
            return
        self._finished = True
        _events.leave(self._sink)
        info = session.rank_info()
        self.report.processes, self.report.rank = info.world, info.rank
        self.report.chips = len(described.devices())
        print(text.text(self.report), file=out, end="", flush=True)
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self.report.as_json(), indent=1))
        if self._options.html is not None:
            self._options.html.write_text(text.page(self.report), encoding="utf-8")


_latest: _Watching | None = None


def report() -> Report:
    """The report of this process so far; RuntimeError where its devices are not described."""
    if _latest is None:
        do = "start it with python -m torch_xla.ahead, or XLA_AHEAD=v5e:4x4"
        raise RuntimeError(message("ahead", "this process runs on devices that are here", do=do))
    return _latest.report


def _watch(script: str) -> _Watching:
    """Starts a report, with the options of the environment."""
    asked = shlex.split(_config.XLA_AHEAD.get() or "")
    global _latest
    _latest = _Watching(_parser(inside=True).parse_args(asked), script)
    return _latest


def watch_from_environment() -> None:
    """Makes a report of this process, at its end; called at import where the environment names a topology."""
    watching = _watch(sys.argv[0] if sys.argv else "")
    pid = os.getpid()

    def finish() -> None:
        if os.getpid() == pid and client.client_started():
            watching.finish(sys.stderr)
            if not watching.report.fits:
                _bindings.exit_with_failure()

    atexit.register(finish)
