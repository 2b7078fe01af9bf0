"""Libraries in jobs of two processes, unmodified; what they run is in caller_bodies.py."""

from __future__ import annotations

from pathlib import Path

import caller_bodies
import pytest
import torch
import trainer_body
from probes import python

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_accelerate_trains_gathers_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    launcher.run(caller_bodies.accelerate_loop, (str(tmp_path),), 2)


def test_the_trainer_of_transformers_learns_what_one_process_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    host, job = tmp_path / "host", tmp_path / "job"
    without = "import sys; sys.modules['torch_xla'] = None"
    run = f"{without}; import trainer_body; trainer_body.trainer(0, {str(host)!r}, True, 4)"
    python("-c", run, cwd=Path(__file__).parent)
    launcher.run(trainer_body.trainer, (str(job), False, 2), 2)
    expected, result = (transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict() for folder in (host, job))
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5)


def test_transformers_splits_a_model_over_the_processes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    launcher.run(caller_bodies.split_by_transformers, (str(tmp_path),), 2)


SCRIPT = f"""
import sys, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
warnings.simplefilter("ignore")
import pytorch_lightning as lightning, torch
from torch import nn
from torch.utils.data import DataLoader
from caller_bodies import data, model

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = model()
    def training_step(self, batch, index):
        assert batch[0].device.type == "xla"
        return nn.functional.mse_loss(self.body(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    module = Module()
    trainer = lightning.Trainer(
        accelerator="tpu", devices=2, max_epochs=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=sys.argv[1],
    )
    # Lightning shuffles what it splits, so each step takes all of it.
    trainer.fit(module, DataLoader(data(), batch_size=12))
    torch.save(module.body.state_dict(), sys.argv[1] + "/found")
"""


def test_the_xla_strategy_of_lightning_learns_what_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    python(script, tmp_path, devices=2, imported=True, PJRT_DEVICE="CPU")
    host = caller_bodies.model()
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    inputs, targets = caller_bodies.data().tensors
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(host(inputs), targets).backward()
        optimizer.step()
    result = torch.load(tmp_path / "found")
    for name, value in host.state_dict().items():
        torch.testing.assert_close(result[name].cpu(), value, rtol=1e-4, atol=1e-5)
