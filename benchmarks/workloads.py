"""The six programs that tests compare with the CPU and that benchmarks time.

They are plain PyTorch: nothing here knows which device it runs on. Weights are made on the CPU from a fixed seed and
moved, the data is real and fixed, so every device sees the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Device = torch.device | str


@dataclass
class Workload:
    """A program that advances by one step at a time.

    Attributes:
        name: Key in `WORKLOADS`.
        model: The module that the step calls; may be compiled in place.
        step: Runs one step and returns its loss, a scalar tensor on the device.
    """

    name: str
    model: nn.Module
    step: Callable[[], Tensor]


def compile_in_place(model: nn.Module, **options: Any) -> None:
    """Puts torch.compile around the model's forward; `nn.Module.compile` leaves an `nn.Sequential` uncompiled."""
    model.forward = torch.compile(model.forward, **options)  # type: ignore[method-assign]


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: images (1797, 8, 8) float32 in [0, 1], labels (1797,) int64."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target, dtype=torch.int64)


def licence_tokens(batch: int, length: int) -> Tensor:
    """The bytes of this project's licence text as (batches, batch, length) int64 tokens below 256."""
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    count = len(text) // (batch * length)
    return torch.tensor(list(text[: count * batch * length])).view(count, batch, length)


def moved(batches: Iterable[tuple[Tensor, ...]], device: Device) -> list[tuple[Tensor, ...]]:
    return [tuple(part.contiguous().to(device) for part in batch) for batch in batches]


def training(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Workload:
    """A training loop that goes round `batches`, which are on the device; `loss_of` gets the model and a batch."""
    source = cycle(batches)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(workload.model, *next(source))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss.detach()

    workload = Workload(name, model, step)
    return workload


# (a) ------------------------------------------------------------------------------------------------------------------


def mlp_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(20)))


def mlp_batches() -> list[tuple[Tensor, Tensor]]:
    """Upper and lower halves of digits, each (16, 32) float32."""
    pixels = digits()[0][:128].flatten(1)
    return list(zip(pixels[:, :32].split(16), pixels[:, 32:].split(16), strict=True))


def mlp(device: Device) -> Workload:
    """20 x (Linear 32, LayerNorm, GELU), batch 16: the upper half of a digit's pixels predicts the lower half."""
    model = mlp_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = moved(mlp_batches(), device)
    return training("mlp", model, optimizer, batches, lambda net, x, y: F.mse_loss(net(x), y))


# (b) ------------------------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """The 18-layer residual network with its ImageNet stem: (N, 3, H, W) float32 to (N, classes) scores.

    Residual branches start at zero, as is usual for training. It matters for comparisons: from torch's default start
    the first steps amplify a rounding error ten-thousand-fold.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(self.blocks(x).mean((2, 3)))


# A larger rate lets a rounding error decide which units of the ReLUs switch on, and devices drift apart in 20 steps.
RESNET_RATE = 5e-5


def photo_patches(size: int = 64) -> tuple[Tensor, Tensor]:
    """scikit-learn's two sample photographs cut into patches, shuffled.

    Returns:
        Patches (120, 3, 64, 64) float32, normalised by channel, and which photograph each is from, (120,) int64.
    """
    from sklearn.datasets import load_sample_images

    photos = torch.stack([torch.tensor(image) for image in load_sample_images().images]).permute(0, 3, 1, 2) / 255
    patches = photos.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5)
    labels = torch.arange(len(photos)).repeat_interleave(patches[0, :, :, 0, 0, 0].numel())
    patches = patches.reshape(-1, 3, size, size)
    patches = (patches - patches.mean((0, 2, 3), keepdim=True)) / patches.std((0, 2, 3), keepdim=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return patches[order], labels[order]


def resnet_model() -> nn.Module:
    torch.manual_seed(0)
    return ResNet18()


def resnet_batches() -> list[tuple[Tensor, Tensor]]:
    patches, labels = photo_patches()
    return list(zip(patches.split(8), labels.split(8), strict=True))


def resnet(device: Device) -> Workload:
    """ResNet-18 in training mode (batch normalisation included), on 8 patches of 64x64 a step."""
    model = resnet_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RESNET_RATE, momentum=0.9, weight_decay=5e-4)
    batches = moved(resnet_batches(), device)
    return training("resnet", model, optimizer, batches, lambda net, x, y: F.cross_entropy(net(x), y))


# (c) ------------------------------------------------------------------------------------------------------------------

GPT2_STEPS = 1000
GPT2_RATE = 3e-4


def gpt2_model(attention: str = "sdpa", layers: int = 6) -> nn.Module:
    """A width-256 GPT-2 over bytes with random weights and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=256,
        n_layer=layers,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def _language_model(
    name: str, model: nn.Module, device: Device, rate: float, cosine_steps: int | None = None
) -> Workload:
    """Training with AdamW, 4 sequences of 128 bytes a step; the rate may fall as a cosine over so many steps."""
    model = model.to(device)
    batches = moved(((tokens,) for tokens in licence_tokens(4, 128)), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cosine_steps) if cosine_steps else None
    return training(
        name, model, optimizer, batches, lambda net, tokens: net(input_ids=tokens, labels=tokens).loss, scheduler
    )


def gpt2(device: Device, layers: int = 6) -> Workload:
    """GPT-2 from transformers with a cosine learning rate."""
    return _language_model("gpt2", gpt2_model(layers=layers), device, GPT2_RATE, GPT2_STEPS)


# (d) ------------------------------------------------------------------------------------------------------------------


UNET_STEPS = 20


def unet_parts() -> tuple[nn.Module, Tensor, Tensor]:
    """A small UNet2DConditionModel for inference, noise (1, 4, 16, 16) to start from and a condition (1, 8, 32)."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model.eval(), torch.randn(1, 4, 16, 16), torch.randn(1, 8, 32)


def unet(device: Device) -> Workload:
    """20 denoising steps of that network under DDIMScheduler, from fixed noise, then again from it.

    The "loss" of a step is the mean square of the latents after it.
    """
    from diffusers import DDIMScheduler

    model, noise, condition = unet_parts()
    model, condition = model.to(device), condition.to(device)
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(UNET_STEPS, device=device)
    times = cycle(range(UNET_STEPS))
    latents = noise

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal latents
        index = next(times)
        if index == 0:
            latents = noise.to(device)
        time = scheduler.timesteps[index]
        predicted = workload.model(
            scheduler.scale_model_input(latents, time), time, encoder_hidden_states=condition
        ).sample
        latents = scheduler.step(predicted, time, latents).prev_sample
        return latents.square().mean()

    workload = Workload("unet", model, step)
    return workload


# (e) ------------------------------------------------------------------------------------------------------------------


def digits_cnn(device: Device) -> Workload:
    """The network of `examples/digits.py` with its optimizer, 32 images a step."""
    from examples.digits import DigitsNet

    torch.manual_seed(0)
    model = DigitsNet().to(device)
    images, labels = digits()
    batches = moved(zip(images[:640].unsqueeze(1).split(32), labels[:640].split(32), strict=True), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    return training("digits", model, optimizer, batches, lambda net, x, y: F.cross_entropy(net(x), y))


# (f) ------------------------------------------------------------------------------------------------------------------

LLAMA_RATE = 3e-4


def llama_model() -> nn.Module:
    """A width-256 Llama of 4 layers over bytes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def llama(device: Device) -> Workload:
    """Llama from transformers."""
    return _language_model("llama", llama_model(), device, LLAMA_RATE)


WORKLOADS: dict[str, Callable[[Device], Workload]] = {
    "mlp": mlp,
    "resnet": resnet,
    "gpt2": gpt2,
    "unet": unet,
    "digits": digits_cnn,
    "llama": llama,
}


def build(name: str, device: Device) -> Workload:
    """The workload of that name with its weights and data on `device`."""
    return WORKLOADS[name](device)
