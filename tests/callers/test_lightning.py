"""Lightning on device xla: one device, as `accelerator="tpu"` and with the strategy given as an object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from pytorch_lightning.accelerators import XLAAccelerator
from pytorch_lightning.strategies import SingleDeviceXLAStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# Lightning advises on worker processes and batch counts, and its own code is behind current torch and Python here.
pytestmark = pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning", "ignore::Warning:lightning_fabric")

BATCH, BATCHES, EPOCHS = 4, 5, 3


class Classifier(lightning.LightningModule):
    """A small classifier with a schedule, dropout-free so that devices agree; remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.head = nn.Linear(12, 6)
        self.losses: list[Tensor] = []
        self.devices: set[str] = set()

    def _loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        self.devices.add(str(inputs.device))
        return nn.functional.cross_entropy(self.head(self.body(inputs)), targets)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.head(self.body(batch[0])).argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    count = BATCH * BATCHES
    inputs = torch.randn(count, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 6, (count,), generator=generator)), BATCH)


def trainer_of(folder: Path, **options: Any) -> lightning.Trainer:
    settings = {
        "max_epochs": EPOCHS, "gradient_clip_val": 0.5, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    return lightning.Trainer(**{**settings, **options})


def cpu_run(folder: Path, **options: Any) -> Classifier:
    model = Classifier()
    trainer_of(folder, accelerator="cpu", devices=1, **options).fit(model, loader(), loader())
    return model


def test_lightning_finds_the_devices_that_were_asked_for() -> None:
    import torch_xla

    assert XLAAccelerator.is_available()
    assert XLAAccelerator.auto_device_count() == torch_xla.device_count()
    stats = XLAAccelerator().get_device_stats("xla:0")
    assert all(value >= 0 for value in stats.values())


@pytest.mark.parametrize("way", ["name", "strategy"])
def test_fit_agrees_with_the_cpu(way: str, tmp_path: Path, compiles: Any) -> None:
    expected = cpu_run(tmp_path)
    options: dict[str, Any] = {"accelerator": "tpu", "devices": 1}
    if way == "strategy":
        options = {"strategy": SingleDeviceXLAStrategy(0, accelerator=XLAAccelerator())}
    model = Classifier()
    trainer = trainer_of(tmp_path, **options)
    assert isinstance(trainer.strategy, SingleDeviceXLAStrategy)
    trainer.fit(model, loader(), loader())
    assert model.devices == {"xla:0"}
    losses = [loss.item() for loss in model.losses]
    assert losses == pytest.approx([loss.item() for loss in expected.losses], rel=1e-3)
    assert trainer.callback_metrics["val_loss"].item() < losses[0]
    again = Classifier()
    with compiles(0):
        trainer_of(tmp_path, accelerator="tpu", devices=1).fit(again, loader(), loader())


def test_validate_and_predict(tmp_path: Path) -> None:
    model = Classifier()
    trainer = trainer_of(tmp_path, accelerator="tpu", devices=1)
    (metrics,) = trainer.validate(model, loader(), verbose=False)
    host = trainer_of(tmp_path, accelerator="cpu", devices=1)
    (expected,) = host.validate(Classifier(), loader(), verbose=False)
    assert metrics["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)
    predicted = torch.cat(trainer.predict(model, loader()))
    assert torch.equal(predicted.cpu(), torch.cat(host.predict(Classifier(), loader())))


def test_a_checkpoint_resumes_and_loads_without_xla(tmp_path: Path) -> None:
    whole = Classifier()
    trainer_of(tmp_path, accelerator="tpu", devices=1).fit(whole, loader())
    first = Classifier()
    trainer = trainer_of(tmp_path, accelerator="tpu", devices=1, max_epochs=2)
    trainer.fit(first, loader())
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    assert {value.device.type for value in state.values()} == {"cpu"}

    resumed = Classifier()
    trainer_of(tmp_path, accelerator="tpu", devices=1).fit(resumed, loader(), ckpt_path=path)
    expected = [loss.item() for loss in whole.losses[2 * BATCHES :]]
    assert [loss.item() for loss in resumed.losses] == pytest.approx(expected, rel=1e-5)


def test_gradients_accumulate(tmp_path: Path) -> None:
    expected = cpu_run(tmp_path, accumulate_grad_batches=2)
    model = Classifier()
    trainer_of(tmp_path, accelerator="tpu", devices=1, accumulate_grad_batches=2).fit(model, loader())
    result, reference = ([loss.item() for loss in run.losses] for run in (model, expected))
    assert result == pytest.approx(reference, rel=1e-3)


def test_fabric(tmp_path: Path) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="tpu", devices=1)
    fabric.launch()
    torch.manual_seed(2)
    model = nn.Linear(6, 6)
    host = nn.Linear(6, 6)
    host.load_state_dict(model.state_dict())
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    host_optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    for (inputs, targets), (host_inputs, host_targets) in zip(
        fabric.setup_dataloaders(loader()), loader(), strict=True
    ):
        assert inputs.device.type == "xla"
        fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(host(host_inputs), host_targets).backward()
        host_optimizer.step()
        host_optimizer.zero_grad()
    torch.testing.assert_close(model.weight.cpu(), host.weight, rtol=1e-4, atol=1e-6)
    fabric.save(tmp_path / "fabric.ckpt", {"model": model})
    assert torch.equal(torch.load(tmp_path / "fabric.ckpt")["model"]["weight"], model.weight.cpu())
