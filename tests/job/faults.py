"""Ways for the processes of a job to differ or to die, and what each of them and the launcher say.

``python tests/job/faults.py --table --processes 2 4`` writes the table of docs/distributed.md; ``--json FILE`` what was
seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

DOCUMENT = Path(__file__).parents[2] / "docs" / "distributed.md"
_BEGIN, _END = "<!-- faults: begin -->", "<!-- faults: end -->"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in rank 1.

    Attributes:
        what: In words.
        body: What each rank does; the arguments are a tensor and what marks the moment.
        told: What whoever notices it must be told, as a pattern.
        raised: What the launcher must raise, as a pattern.
        env: Further variables.
        noticed: Whether the other ranks have an error of their own.
    """

    what: str
    body: Callable[[torch.Tensor, Callable[[], None]], None]
    told: str
    raised: str
    env: dict[str, str] = field(default_factory=dict)
    noticed: bool = True


FAULTS: dict[str, Fault] = {}
_LINE = r"\S*faults\.py:\d+ in \S+"


def _differ(others: str, culprit: str) -> str:
    """What is told where rank 1 runs something else; whoever is compared first is named."""
    others, culprit = rf"{others}.*{_LINE}", rf"{culprit}.*{_LINE}"
    return rf"rank \d runs {others}\), rank 1 runs {culprit}|rank 1 runs {culprit}\), rank \d runs {others}"


def _fault(
    what: str, told: str, raised: str | None = None, noticed: bool = True, **env: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(body: Callable[..., None]) -> Callable[..., None]:
        FAULTS[body.__name__] = Fault(what, body, told, raised or told, env, noticed)
        return body

    return add


def _sum(x: torch.Tensor, kind: str = "sum", groups: list[list[int]] | None = None) -> torch.Tensor:
    y = xm.all_reduce(kind, x, groups=groups)
    torch_xla.sync(wait=True)
    return y


def _culprit() -> bool:
    return xr.global_ordinal() == 1


@_fault(
    "raises",
    rf"rank 1 has ended \(ValueError: bad sample\).* all_reduce of Float\[4\].*, at {_LINE}",
    "ValueError: bad sample",
)
def raises(x, now):
    if _culprit():
        now()
        raise ValueError("bad sample")
    _sum(x)


@_fault("ends early, as if all were done", rf"rank 1 has ended \(its program was over\).* all_reduce.*, at {_LINE}")
def ends(x, now):
    if _culprit():
        return now()
    _sum(x)


@_fault(
    "calls sys.exit(3)",
    rf"rank 1 has ended \(SystemExit: 3\).* all_reduce.*, at {_LINE}",
    "process 1 terminated with exit code 3",
)
def exits(x, now):
    if _culprit():
        now()
        sys.exit(3)
    _sum(x)


@_fault(
    "is killed in a collective",
    rf"rank 1 has ended \((it was killed|it was ended by SIGKILL)\).* all_reduce.*, at {_LINE}",
    "process 1 terminated with signal SIGKILL",
)
def killed(x, now):
    if _culprit():
        now()
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        _sum(x)
    time.sleep(1.0)
    _sum(x)


@_fault(
    "is killed while the others compute",
    rf"rank 1 has ended \((it was killed|it was ended by SIGKILL)\).* all_reduce.*, at {_LINE}",
    "process 1 terminated with signal SIGKILL",
)
def killed_beside(x, now):
    if _culprit():
        now()
        os.kill(os.getpid(), signal.SIGKILL)
    (x + x).tolist()
    time.sleep(1.0)
    _sum(x)


@_fault("comes late", "", noticed=False, XLA_COLLECTIVE_PATIENCE="1")
def late(x, now):
    if _culprit():
        now()
        time.sleep(3)
    assert _sum(x).tolist() == [float(xr.world_size())] * 4


@_fault(
    "never comes",
    rf"rank \d waited \d+ s in all_reduce of Float\[4\], at {_LINE}, for rank 1, which is at {_LINE}; "
    "XLA_COLLECTIVE_TIMEOUT",
    XLA_COLLECTIVE_TIMEOUT="3",
)
def never(x, now):
    if _culprit():
        now()
        while True:
            time.sleep(0.1)
    _sum(x)


@_fault(
    "runs one collective more in between",
    _differ(r"all_reduce\(sum\) of float32\[4\]", r"all_reduce\(max\)"),
)
def one_more(x, now):
    now()
    if _culprit():
        x = xm.all_reduce("max", x)
    _sum(x)


@_fault("runs one collective more at the end", rf"rank \d has ended \(its program was over\).*rank 1.* at {_LINE}")
def one_more_at_end(x, now):
    now()
    _sum(x)
    if _culprit():
        _sum(x)


@_fault(
    "runs them in another order",
    _differ(r"all_reduce\(sum\)", r"all_reduce\(max\)"),
)
def order(x, now):
    now()
    kinds = ("max", "sum") if _culprit() else ("sum", "max")
    y = [xm.all_reduce(kind, x) for kind in kinds]
    torch_xla.sync(wait=True)
    del y


@_fault("runs another kind", _differ(r"all_reduce\(sum\)", "all_gather"))
def kind(x, now):
    now()
    y = xm.all_gather(x) if _culprit() else xm.all_reduce("sum", x)
    torch_xla.sync(wait=True)
    del y


@_fault("has another shape", _differ(r".* float32\[4\]", r".* float32\[8\]"))
def shape(x, now):
    now()
    _sum(torch.cat([x, x]) if _culprit() else x)


@_fault("has another dtype", _differ(r".* float32\[4\]", r".* int32\[4\]"))
def dtype(x, now):
    now()
    _sum(x.int() if _culprit() else x)


@_fault(
    "runs another program that all know",
    _differ(r"all_reduce\(sum\) of float32\[4\]", r"all_reduce\(max\) of float32\[3\]"),
)
def known(x, now):
    for _ in range(2):
        _sum(x * 2)
        _sum(x[:3] + 1, "max")
    now()
    if _culprit():
        _sum(x[:3] + 1, "max")
    else:
        _sum(x * 2)


@_fault(
    "names the processes of a group otherwise",
    rf"the processes wait for each other: rank \d waits in .*with ranks .*{_LINE}; rank \d waits in .*{_LINE}",
)
def groups(x, now):
    now()
    members = list(range(xr.world_size()))
    _sum(x, groups=[members[::-1] if _culprit() else members])


@_fault("does not come to a rendezvous", rf"rank 1 has ended .*rank \d waits .* rendezvous 'save', at {_LINE}")
def no_rendezvous(x, now):
    now()
    if not _culprit():
        xm.rendezvous("save")


@_fault(
    "is in another rendezvous",
    rf"wait for each other: .*rendezvous '(save|load)'.*{_LINE}; .*rendezvous '(save|load)'.*{_LINE}",
)
def rendezvous(x, now):
    now()
    xm.rendezvous("load" if _culprit() else "save")


@_fault(
    "is in a rendezvous, the others in a collective",
    rf"wait for each other: .*(rendezvous 'load'|all_reduce).*{_LINE}; .*(rendezvous 'load'|all_reduce).*{_LINE}",
)
def mixed(x, now):
    now()
    if _culprit():
        xm.rendezvous("load")
    else:
        _sum(x)


@_fault(
    "has a full disk, the others are in a barrier of PyTorch's",
    rf"rank 1 has ended \(.*No space left.*, and rank \d waits for it in torch.distributed.barrier\(\), at {_LINE}",
    "No space left",
)
def barrier(x, now):
    dist.init_process_group("xla", init_method="xla://")
    now()
    if _culprit():
        Path("/dev/full").write_text("a checkpoint")
    dist.barrier()


@_fault(
    "raises before it has joined",
    rf"rank 1 has ended \(ValueError: no data\), and rank \d waits for it in the start of the job, at {_LINE}",
    "ValueError: no data",
)
def before_joining(x, now):
    pass  # see `_rank`


def _rank(index: int, name: str, folder: str) -> None:
    fault = FAULTS[name]

    def now() -> None:
        Path(folder, f"{index}.began").write_text(str(time.time()))

    def tell(text: str) -> None:
        seen = {"seconds": time.time(), "text": text}
        Path(folder, f"{index}.ended").write_text(json.dumps(seen))

    try:
        if name == "before_joining" and index == 1:
            now()
            raise ValueError("no data")
        x = torch.ones(4, device="xla")
        _sum(x)
        fault.body(x, now)
    except BaseException as error:
        tell(f"{type(error).__name__}: {error}")
        raise
    tell("")


@dataclass
class Seen:
    """What came of a fault.

    Attributes:
        launcher: What the launcher raised; "" for nothing.
        seconds: How long after the fault.
        ranks: What each rank that ended by itself raised, and how long after the fault.
    """

    launcher: str
    seconds: float
    ranks: dict[int, tuple[str, float]]

    def told(self) -> list[str]:
        """The errors of ranks, without those that the culprit raised itself."""
        return [text for text, _ in self.ranks.values() if "JobError" in text]


def observe(name: str, processes: int) -> Seen:
    """Starts a job in which something goes wrong."""
    with tempfile.TemporaryDirectory() as folder:
        saved = dict(os.environ)
        os.environ.update(FAULTS[name].env)
        try:
            xmp.spawn(_rank, (name, folder), processes)
            launcher = ""
        except Exception as error:
            launcher = f"{type(error).__name__}: {error}"
        finally:
            os.environ.clear()
            os.environ.update(saved)
        ended = time.time()
        began = max((float(f.read_text()) for f in Path(folder).glob("*.began")), default=ended)
        ranks = {}
        for file in sorted(Path(folder).glob("*.ended")):
            result = json.loads(file.read_text())
            ranks[int(file.stem)] = (result["text"], result["seconds"] - began)
        return Seen(launcher, ended - began, ranks)


def _first_error(seen: Seen) -> str:
    text = min((s, t) for t, s in seen.ranks.values() if "JobError" in t)[1] if seen.told() else "the value, late"
    return re.sub(r"[^ (]*/(?=faults\.py)", "", text).replace("|", "\\|")


def _table(result: dict[str, dict[int, Seen]]) -> str:
    counts = sorted({count for by_count in result.values() for count in by_count})
    rows = [f"| rank 1 | {' | '.join(f'{c} processes' for c in counts)} | what the others are told |"]
    rows.append("|---|" + "--:|" * len(counts) + "---|")
    for name, by_count in result.items():
        times = [f"{by_count[c].seconds:.1f} s" for c in counts]
        rows.append(f"| {FAULTS[name].what} | {' | '.join(times)} | {_first_error(by_count[counts[0]])} |")
    return "\n".join(rows)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAULTS))
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("CPU_NUM_DEVICES", str(max(chosen.processes)))
    results: dict[str, dict[int, Seen]] = {}
    for name in chosen.names:
        for processes in chosen.processes:
            seen = results.setdefault(name, {})[processes] = observe(name, processes)
            print(
                f"--- {name}, {processes} processes: {seen.seconds:.1f} s\n{seen.launcher.strip().splitlines()[-1:]}",
                flush=True,
            )
            for rank, (text, seconds) in seen.ranks.items():
                print(f"rank {rank} after {seconds:.1f} s: {text}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({n: {c: asdict(s) for c, s in by.items()} for n, by in results.items()}))
    if chosen.table:
        before, _, rest = DOCUMENT.read_text().partition(_BEGIN)
        DOCUMENT.write_text(f"{before}{_BEGIN}\n{_table(results)}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    _main()
