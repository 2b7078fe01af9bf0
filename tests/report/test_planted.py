"""What a script says by itself of its problems: each of five is named with its line, and a clean one says nothing.

The report of a profile names them too, whether or not they are told by default.
"""

import html
import re
from pathlib import Path

import pytest
from probes import python

CLEAN = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
kept = []


def train(number, rows=32, share=1.0):
    x, y = torch.randn(rows, 64).to("xla"), torch.randint(10, (rows,)).to("xla")
    out = model(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    schedule.step()
    return out.detach(), y, loss.detach()


profiled = torch_xla.debug.profile().__enter__()
for number in range(34):
    out, y, loss = train(number)
    kept.append(loss)
    if number % 5 == 0:
        print(loss.item(), (out.argmax(1) == y).sum().item(), out.softmax(1).amax().item())
profiled.__exit__()
profiled.save("report.html")
"""

# What is put in place of what; then what is said of it by default, and in the report. Braces hold a piece of the line's
# text.
PLANTED = {
    "a ragged batch": (
        {"train(number)": "train(number, 32 if number % 6 < 5 else 19)"},
        ("compiling a graph again at {torch_xla.sync()} in train", "went from float32[32, 64] to float32[19, 64]"),
        ("compiled again", "went from float32[32, 64] to float32[19, 64]", "{torch_xla.sync()} in train"),
    ),
    "a float that changes the shape": (
        {
            "train(number)": "train(number, share=1 - number % 3 / 10)",
            "model(x)": "model(x[: int(rows * share)])",
            "(out, y)": "(out, y[: len(out)])",
            "(), y,": "(), y[: len(out)],",
        },
        ("compiling a graph again at {torch_xla.sync()} in train", "argument 3 of aten.slice.Tensor went from"),
        ("compiled again", "argument 3 of aten.slice.Tensor went from", "{torch_xla.sync()} in train"),
    ),
    "a value read in the step": (
        {"    loss.backward()": "    assert loss.item() < 1e6\n    loss.backward()"},
        ("a value is read in the middle of the step at {loss.item()} in train, 3 steps in a row",),
        ("34 values read at {loss.item()} in train",),
    ),
    "an operator on the host": (
        {"    out = model(x)\n": "    out = model(x) + y.unique().sum() * 0\n"},
        (
            "aten::_unique2 runs on the host, between two programs: its result depends on the values "
            "({out = } in train)",
        ),
        ("aten::_unique2 ran on the host 34 times at {out = } in train",),
    ),
    "a list that keeps graphs alive": (
        {"y, loss.detach()": "y, torch.nn.functional.cross_entropy(model(x), y)"},
        (
            "tensors made at {y, torch.} in train pile up: ",
            "MiB, more with each step since step 8; something keeps them",
        ),
        ("more tensors are kept with every step: ", "MiB) made at {y, torch.} in train"),
    ),
}


def run(tmp_path: Path, text: str) -> tuple[str, str]:
    """What a script writes to stderr, and the words of its report."""
    path = tmp_path / "train.py"
    path.write_text(text)
    done = python(path, devices=1, cwd=tmp_path, timeout=300, imported=True, XLA_NOTICES="all")
    page = (tmp_path / "report.html").read_text()
    return done.stderr, html.unescape(page[: page.index('<script type="application/json"')])


def test_a_clean_script_says_nothing(tmp_path):
    told, report = run(tmp_path, CLEAN)
    assert told == ""
    assert "No operator ran on the host." in report


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("compiled", marks=pytest.mark.compiled("both ways")),
        pytest.param("by default", marks=pytest.mark.by_default("both ways")),
    ],
)
def test_the_report_of_a_clean_script_finds_no_new_graphs(way, tmp_path):
    _, report = run(tmp_path, CLEAN)
    assert "compiled again" not in report


@pytest.mark.parametrize("problem", PLANTED)
@pytest.mark.costs("a process that trains")
def test_a_problem_is_named(problem, tmp_path):
    changes, said, shown = PLANTED[problem]
    text = CLEAN
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    told, report = run(tmp_path, text)
    for words in said:
        assert re.sub(r"\{(.*?)\}", lambda part: f"{tmp_path / 'train.py'}:{line_of(part[1], text)}", words) in told
    for words in shown:
        assert re.sub(r"\{(.*?)\}", lambda part: f"train.py:{line_of(part[1], text)}", words) in report


def line_of(part: str, text: str) -> int:
    return 1 + text[: text.index(part)].count("\n")
