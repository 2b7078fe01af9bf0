"""A program that does not use xla notices nothing of this package being installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What torch keeps for the whole process and a program may look at.
STATE = """
import torch
def state():
    return {
        "dtype": torch.get_default_dtype(), "device": torch.get_default_device(), "threads": torch.get_num_threads(),
        "swap": bool(torch.__future__.get_swap_module_params_on_conversion()),
        "precision": torch.get_float32_matmul_precision(), "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"), "random": torch.random.initial_seed(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "accelerator": torch.accelerator.is_available(),
        # Of devices that another program may have; xla is added to them.
        "foreach": {*torch.utils._foreach_utils._get_foreach_kernels_supported_devices()} - {"xla"},
    }
"""
NO_CLIENT = """
import sys
if "torch_xla" in sys.modules:
    assert not sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized(), "a client was started"
assert "jax" not in sys.modules, "jax was imported"
"""
PROGRAMS = {
    "torch alone, defaults and barriers that cost nothing": """
import sys, torch
torch.ones(2).sum().item()
assert "torch_xla" not in sys.modules
"""
    + STATE
    + """
torch.manual_seed(0)
before, numbers = state(), torch.rand(3)
import torch_xla, torch_xla.core.xla_model as xm
xm.mark_step()
torch_xla.sync()
assert state() == before, (state(), before)
torch.manual_seed(0)
assert torch.equal(torch.rand(3), numbers)
layer = torch.nn.Linear(2, 2)
weight = layer.weight
assert layer.to(torch.float64).weight is weight and layer.to("meta").weight is not weight

import time
start = time.perf_counter()
for _ in range(2000):
    xm.mark_step()
assert time.perf_counter() - start < 2, "more than a millisecond per barrier"
""",
    "libraries": """
from transformers import GPT2Config, GPT2LMHeadModel
import torch
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
tokens = torch.arange(4)[None]
assert model(tokens).logits.device.type == "cpu"
assert model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, pad_token_id=0).shape[0] == 1

from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
unet = UNet2DModel(sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
                   down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
pipeline = DDPMPipeline(unet=unet, scheduler=DDPMScheduler())
pipeline.set_progress_bar_config(disable=True)
assert pipeline(num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 3)

import pytorch_lightning as lightning
trainer = lightning.Trainer(logger=False, enable_checkpointing=False, max_epochs=1)
assert trainer.strategy.root_device.type == "cpu", trainer.strategy
""",
    "accelerate without xla": """
import os
os.environ["USE_TORCH_XLA"] = "0"
import torch
from accelerate import Accelerator
accelerator = Accelerator()
assert accelerator.device.type == "cpu", accelerator.device
model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), lr=0.1)))(torch.nn.Linear(2, 1)))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.costs("a process that imports all anew")
def test_a_program_without_xla(name: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS[name] + NO_CLIENT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
