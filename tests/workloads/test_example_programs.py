"""The programs of examples/, in small: they learn, draw and answer, and refuse what they cannot do in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probes import ROOT, python

import torch_xla
import torch_xla.runtime as xr
from examples import digits_diffusion, llm_data, text_to_image, train_digits_multi, train_llm

Compiles = Callable[..., AbstractContextManager[Any]]
SMALL_LLM = ["--hidden", "32", "--layers", "1", "--heads", "2", "--sequence", "32", "--batch-size", "4"]
SMALL_LLM += ["--characters", "20000"]
SCHEDULERS = list(text_to_image.SCHEDULERS)


def said(refused: pytest.ExceptionInfo[SystemExit]) -> str:
    text = str(refused.value)
    assert "\n" not in text
    return text


# Drawing digits -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = digits_diffusion.load_digits()
    return images[:32], labels[:32]


@pytest.mark.costs("whole models are compiled")
def test_a_network_of_digits_learns_and_draws_in_one_graph_each(
    digits: tuple[torch.Tensor, torch.Tensor], compiles: Compiles, tmp_path: Path
) -> None:
    trainer = digits_diffusion.Trainer("xla", 8, 20)
    images, labels = (x.to("xla") for x in digits)
    torch_xla.sync()
    losses = []
    with compiles() as training:
        for _ in range(8):
            losses.append(trainer.step(images, labels))
            torch_xla.sync()
    assert training.value <= 1
    result = torch.stack(losses).cpu()
    assert result[-3:].mean() < result[:3].mean()
    with compiles() as drawing:
        drawn = digits_diffusion.draw(trainer.average, torch.arange(10).to("xla"), 2).cpu()
    assert drawing.value <= 1
    assert drawn.shape == (10, 1, 8, 8)
    assert drawn.abs().max() <= 1
    digits_diffusion.draw_grid(drawn, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_a_classifier_knows_the_real_digits(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert digits_diffusion.recognised(*digits) > 0.95


# Training a language model --------------------------------------------------------------------------------------------


def test_parts_of_a_step_have_the_losses_of_the_whole_on_the_cpu() -> None:
    options = train_llm.parse(SMALL_LLM)
    tokens = next(llm_data.batches(llm_data.encode(llm_data.documentation(20_000)), 4, 32, seed=1))
    results = []
    for device, parts in (("cpu", 1), ("xla", 2)):
        options.accumulate = parts
        trainer = train_llm.Trainer(options, device)
        losses = [trainer.step(tokens.to(device)) for _ in range(3)]
        results.append(torch.stack(losses).cpu())
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)


@pytest.mark.costs("whole models are compiled")
def test_a_run_that_is_taken_up_again_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    def losses(folder: Path, steps: int, *more: str) -> list[float]:
        options = train_llm.parse(
            [*SMALL_LLM, "--steps", str(steps), "--checkpoint", str(folder), "--every", "3", *more]
        )
        options.plot = tmp_path / "curve.png"
        return train_llm.train(0, options)

    whole = losses(tmp_path / "whole", 6)
    assert len(whole) == 6
    first = tmp_path / "whole" / "step-000003"
    (tmp_path / "parts").mkdir()
    first.rename(tmp_path / "parts" / first.name)
    assert losses(tmp_path / "parts", 6, "--resume") == pytest.approx(whole[3:], rel=1e-3)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    other = train_llm.parse([*SMALL_LLM, "--layers", "2", "--checkpoint", str(tmp_path / "parts"), "--resume"])
    with pytest.raises(SystemExit) as refused:
        train_llm.train(0, other)
    assert "another shape: num_hidden_layers 1" in said(refused)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--spmd", "fsdp=4,model=2"], "expected axes such as fsdp=4,tensor=2; there are data, fsdp, tensor"),
        (["--spmd", "fsdp=0"], "expected axes such as"),
        (["--spmd", "fsdp=4", "--fsdp"], "leave one of them out"),
        (["--resume"], "--checkpoint"),
        (["--heads", "5"], "an even share for each head"),
        (["--batch-size", "5", "--accumulate", "2"], "expected a multiple of 2 (devices: 1, --accumulate: 2)"),
    ],
)
def test_training_refuses_in_one_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as refused:
        train_llm.parse(arguments)
    assert reason in said(refused)


@pytest.mark.by_default("it counts the graphs of use")
@pytest.mark.slow
def test_a_run_over_a_mesh_goes_on_from_one_of_a_single_device_with_its_losses(tmp_path: Path) -> None:
    arguments = [*SMALL_LLM, "--steps", "6", "--checkpoint", str(tmp_path), "--every", "3"]
    arguments += ["--plot", str(tmp_path / "curve.png")]
    alone = train_llm.train(0, train_llm.parse(arguments))
    (tmp_path / "step-000006").rename(tmp_path / "done")
    arguments += ["--resume", "--spmd", "data=2,fsdp=2,tensor=2"]
    done = python(ROOT / "examples" / "train_llm.py", *arguments, devices=8, timeout=250, imported=True)
    assert "going on from step 3" in done.stdout
    assert "1 graph compiled" in done.stdout
    assert "torch_xla:" not in done.stderr
    result = re.search(r"step 6: loss (\d\.\d+)", done.stdout)
    assert result is not None
    assert float(result[1]) == pytest.approx(alone[-1], abs=2e-3)


def refused_by(program: Callable[[], object], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    with pytest.raises(SystemExit) as refused:
        program()
    return said(refused)


def test_what_devices_cannot_take_is_refused_before_processes_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(*arguments: str) -> str:
        return refused_by(train_llm.main, monkeypatch, *arguments)

    count = xr.global_runtime_device_count()
    assert f"which is {count + 1} devices, expected {count}" in training("--spmd", f"fsdp={count + 1}")
    assert f"(devices: {count}, --accumulate: 1)" in training("--fsdp", "--batch-size", str(count + 1))
    assert f"a multiple of {count}" in refused_by(train_digits_multi.main, monkeypatch, "--batch-size", str(count + 1))
    saved = tmp_path / "step-000009"
    train_llm.config_of(train_llm.parse(SMALL_LLM)).save_pretrained(saved)
    asked = [*SMALL_LLM, "--checkpoint", str(tmp_path), "--resume", "--steps", "9"]
    assert f"expected more than those that {saved} has" in training(*asked)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many"])
def test_numbers_of_things_are_above_zero(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_llm.parse(["--steps", text])
    assert f"argument --steps: got {text}, expected a number above zero" in capsys.readouterr().err


def test_batches_depend_on_their_number_alone() -> None:
    tokens = torch.arange(1000)
    source = llm_data.batches(tokens, 2, 16, seed=3)
    all_ = [next(source) for _ in range(4)]
    later = llm_data.batches(tokens, 2, 16, seed=3, start=2)
    assert torch.equal(next(later), all_[2])
    with pytest.raises(ValueError, match="more than a sequence of 16"):
        next(llm_data.batches(tokens[:16], 2, 16, seed=3))


# Pictures from words --------------------------------------------------------------------------------------------------


def picture_options(*arguments: str) -> argparse.Namespace:
    options = text_to_image.parse(["a cat", "--steps", "3", "--size", "32", *arguments])
    options.rounds = 1
    return options


@pytest.mark.slow
@pytest.mark.compiled("it pins the graphs of use, where a small read compiles none", reads=False)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers makes arrays so
@pytest.mark.parametrize(
    "scheduler", [name if name == "dpm" else pytest.param(name, marks=pytest.mark.sweep) for name in SCHEDULERS]
)
def test_pictures_agree_with_the_cpu_and_more_steps_compile_nothing(scheduler: str, compiles: Compiles) -> None:
    options = picture_options("--scheduler", scheduler)
    pipeline = text_to_image.load(options)
    expected = text_to_image.draw(pipeline, "a cat", options, [])
    pipeline.to("xla")
    steps: list[int] = []
    result = text_to_image.draw(pipeline, "a cat", options, steps)
    assert steps == [0, 1, 2]
    np.testing.assert_allclose(result, expected, rtol=1e-2, atol=1e-2)
    with compiles(0):
        text_to_image.draw(pipeline, "a dog", options, [])


def test_a_loop_by_hand_draws_what_the_pipeline_draws() -> None:
    options = picture_options()
    pipeline = text_to_image.load(options)
    expected = text_to_image.draw(pipeline, "a cat", options, [])
    result = text_to_image.draw_by_hand(pipeline.to("xla"), "a cat", options, [])
    np.testing.assert_allclose(result, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--size", "40"], "a multiple of 16"), (["--model", "/nowhere/at-all"], "/nowhere/at-all is no folder")],
)
def test_drawing_refuses_in_one_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as refused:
        text_to_image.load(picture_options(*arguments))
    assert reason in said(refused)


# What they share ------------------------------------------------------------------------------------------------------


def test_a_refusal_is_one_line_and_an_error_status(tmp_path: Path) -> None:
    done = python(ROOT / "examples" / "train_resnet.py", "--data", tmp_path, check=False, imported=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        f"train_resnet: there is no folder {tmp_path / 'train'}; give one with train/ and val/, or leave --data out"
    ]


def test_the_peak_is_that_of_a_device_that_computes() -> None:
    assert 0 < train_llm.peak_flops(torch_xla.device(), bf16=False) < 1e14  # 100 TFLOP/s of float32
