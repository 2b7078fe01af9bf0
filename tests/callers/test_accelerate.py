"""accelerate's loop on device xla: the same numbers as a plain loop on the CPU, and one graph per kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader

BATCH, BATCHES, FEATURES, CLASSES = 8, 6, 5, 3
MAX_NORM = 0.05


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """accelerate keeps its state in class attributes."""
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count = BATCH * BATCHES
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=generator))


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def cpu_losses(epochs: int, accumulate: int = 1) -> tuple[list[float], nn.Module]:
    """The loop that accelerate is asked for, without accelerate."""
    model, optimizer, scheduler = parts()
    losses = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(DataLoader(data(), BATCH)):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            (loss / accumulate).backward()
            if (number + 1) % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return losses, model


class Training:
    """Model, optimizer, schedule and loader as accelerate prepared them."""

    def __init__(self, **options: object) -> None:
        self.accelerator = Accelerator(**options)
        model, optimizer, scheduler = parts()
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, DataLoader(data(), BATCH)
        )

    def epoch(self) -> list[Tensor]:
        losses = []
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
                losses.append(loss.detach())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return losses


def test_it_finds_the_device_and_wraps_the_loader() -> None:
    training = Training()
    assert training.accelerator.device == torch.device("xla", 0)
    assert training.accelerator.num_processes == 1
    assert training.accelerator.is_main_process
    assert isinstance(training.loader, MpDeviceLoader)
    assert training.loader.total_batch_size == BATCH
    assert len(training.loader) == BATCHES


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_agrees_with_the_cpu(accumulate: int, compiles) -> None:
    training = Training(gradient_accumulation_steps=accumulate)
    expected, model = cpu_losses(3, accumulate)
    losses = training.epoch() + training.epoch()
    with compiles(0):  # the schedule changes the rate at every step
        losses += training.epoch()
    torch.testing.assert_close(torch.stack(losses).cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    unwrapped = training.accelerator.unwrap_model(training.model)
    for ours, theirs in zip(unwrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    training = Training(mixed_precision=precision)
    expected, _ = cpu_losses(2)
    with training.accelerator.autocast():
        product = torch.ones(2, 2, device="xla") @ torch.ones(2, 2, device="xla")
    assert product.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    losses = training.epoch() + training.epoch()
    torch.testing.assert_close(torch.stack(losses).float().cpu(), torch.tensor(expected), rtol=2e-2, atol=2e-2)
    assert all(p.dtype == torch.float32 for p in training.model.parameters())


def test_gather_reduce_and_broadcast() -> None:
    accelerator = Accelerator()
    value = torch.arange(6.0, device=accelerator.device).view(2, 3)
    assert accelerator.gather(value).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert accelerator.gather({"a": value[0, 1]})["a"].tolist() == [1.0]
    assert accelerator.reduce(value, "sum").tolist() == value.tolist()
    assert accelerator.reduce(value, "mean").tolist() == value.tolist()
    assert accelerator.pad_across_processes(value, dim=1).tolist() == value.tolist()
    assert broadcast_object_list(["text", {"n": 1}]) == ["text", {"n": 1}]
    accelerator.wait_for_everyone()


def test_gradients_are_reduced_when_the_loop_is_at_the_end_and_not_before() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.arange(40.0).reshape(10, 4, 1), None))
    at = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            at.append(accelerator.sync_gradients)
    assert at == [False, False, False, True, False, False, False, True, False, True]


def test_metrics_leave_out_what_fills_the_last_batch() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10.0)), 4))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader])
    assert seen.tolist() == list(range(10))


def test_state_is_saved_and_restored(tmp_path: Path) -> None:
    training = Training()
    set_seed(3)
    training.epoch()
    training.accelerator.save_state(str(tmp_path))
    noise = torch.rand(4, device="xla").tolist()
    host_noise = torch.rand(4).tolist()
    expected = [loss.item() for loss in training.epoch()]

    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    resumed = Training()
    resumed.accelerator.load_state(str(tmp_path))
    assert torch.rand(4, device="xla").tolist() == noise
    assert torch.rand(4).tolist() == host_noise
    assert resumed.scheduler.get_last_lr()[0] < 1e-2
    assert [loss.item() for loss in resumed.epoch()] == expected


def test_a_model_is_saved_as_cpu_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    training = Training()
    training.accelerator.save_model(training.model, tmp_path)
    expected = parts()[0].state_dict()
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], value) for key, value in expected.items())

    training.accelerator.save(training.model.state_dict(), tmp_path / "plain.bin")
    plain = torch.load(tmp_path / "plain.bin")
    assert {value.device.type for value in plain.values()} == {"cpu"}


def test_random_states_are_synchronized() -> None:
    Accelerator()
    from accelerate.utils import synchronize_rng_states

    torch_xla.manual_seed(5)
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(7)
    synchronize_rng_states(["torch", "xla", "generator"], generator)
    assert torch.equal(torch.get_rng_state(), before)
    assert generator.initial_seed() == 7
    first = torch.rand(3, device="xla").tolist()
    torch_xla.manual_seed(5)
    assert torch.rand(3, device="xla").tolist() == first
