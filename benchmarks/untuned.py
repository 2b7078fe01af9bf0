"""Training steps of models that nothing here was tuned to, in the sizes that a CPU trains; random weights and data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Device, Workload, licence_tokens, moved, training


def vit(device: Device) -> Workload:
    """ViT-B/16, AdamW, 2 pictures of 224x224."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(num_labels=1000)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = moved(((torch.randn(2, 3, 224, 224), torch.randint(0, 1000, (2,))) for _ in range(4)), device)
    return training("vit", model, optimizer, batches, lambda net, x, y: F.cross_entropy(net(x).logits, y))


def sd_train(device: Device) -> Workload:
    """A UNet with the blocks of Stable Diffusion 1.5, 64 wide for its 320, AdamW, two latents (4, 16, 16)."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(64, 128, 256, 256), cross_attention_dim=256, attention_head_dim=8
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parts = (
        (torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16), torch.randint(0, 1000, (2,)), torch.randn(2, 77, 256))
        for _ in range(4)
    )
    batches = moved(parts, device)

    def loss(net: nn.Module, noisy: Tensor, noise: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        return F.mse_loss(net(noisy, time, encoder_hidden_states=condition).sample, noise)

    return training("sd_train", model, optimizer, batches, loss)


def bert(device: Device) -> Workload:
    """Fine-tuning of a BERT of 4 layers, width 512, with dropout, for two classes: AdamW, 8 sequences of 64 bytes."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
        num_labels=2,
    )
    model = BertForSequenceClassification(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    parts = ((x, torch.ones_like(x), torch.randint(0, 2, (8,))) for x in licence_tokens(8, 64)[:4])
    batches = moved(parts, device)
    return training(
        "bert",
        model,
        optimizer,
        batches,
        lambda net, x, mask, y: F.cross_entropy(net(x, attention_mask=mask).logits, y),
    )


class _LSTM(nn.Module):
    """Bytes (batch, length) to scores (batch, length, 256)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def lstm(device: Device) -> Workload:
    """A language model of two LSTM layers, width 256, SGD with clipped gradients, 16 sequences of 36 bytes."""
    torch.manual_seed(0)
    model = _LSTM().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = moved(((tokens,) for tokens in licence_tokens(16, 36)[:8]), device)

    def loss(net: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)

    optimizer.register_step_pre_hook(clip)
    return training("lstm", model, optimizer, batches, loss)


WORKLOADS: dict[str, Callable[[Device], Workload]] = {"vit": vit, "sd_train": sd_train, "bert": bert, "lstm": lstm}
