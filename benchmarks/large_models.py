"""Models of the sizes that people use accelerators for, in bfloat16, with random weights and data.

Each takes `small`, which makes it tiny: a program that uses it can then be tried on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Device, Workload, training


def _train(name: str, model: nn.Module, batches: list[Any], loss_of: Callable[..., Tensor]) -> Workload:
    """Training with AdamW under autocast to bfloat16."""
    kind = batches[0][0].device.type

    def loss(net: nn.Module, *batch: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            return loss_of(net, *batch)

    return training(name, model, torch.optim.AdamW(model.parameters(), lr=3e-4), batches, loss)


def _language_model(name: str, model: nn.Module, device: Device, batch: int, length: int) -> Workload:
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    batches = [(torch.randint(0, vocabulary, (batch, length)).to(device),) for _ in range(4)]
    return _train(name, model.to(device), batches, lambda net, tokens: net(input_ids=tokens, labels=tokens).loss)


def gpt2_124m(device: Device, small: bool = False) -> Workload:
    """GPT-2 as it was published (12 layers, width 768), AdamW, 8 sequences of 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2} if small else {}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **tokens, **size)
    return _language_model("gpt2_124m", GPT2LMHeadModel(config), device, *((2, 32) if small else (8, 1024)))


def llama_blocks(device: Device, small: bool = False) -> Workload:
    """Four blocks as of Llama 3.2 1B (width 2,048, 32 heads, 8 of keys and values), 4 sequences of 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4 if small else 32, "num_key_value_heads": 2 if small else 8}
    config = LlamaConfig(
        vocab_size=256 if small else 32_000,
        hidden_size=32 if small else 2048,
        intermediate_size=64 if small else 8192,
        num_hidden_layers=2 if small else 4,
        max_position_embeddings=2048,
        use_cache=False,
        **heads,
    )
    return _language_model("llama_blocks", LlamaForCausalLM(config), device, *((2, 32) if small else (4, 2048)))


def resnet50(device: Device, small: bool = False) -> Workload:
    """ResNet-50, AdamW, 64 images of 224x224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    size: dict[str, Any] = (
        {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]} if small else {}
    )
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **size)).to(device)
    images, side = (2, 32) if small else (64, 224)
    batches = [
        (torch.randn(images, 3, side, side).to(device), torch.randint(0, 1000, (images,)).to(device)) for _ in range(2)
    ]
    return _train("resnet50", model, batches, lambda net, x, y: nn.functional.cross_entropy(net(x).logits, y))


def sd_unet(device: Device, small: bool = False) -> Workload:
    """Denoising by a UNet of Stable Diffusion 1.5's size with bfloat16 weights: two latents (4, 64, 64) a step.

    The "loss" of a step is the mean square of what was predicted.
    """
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    size: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
    if small:
        size: dict[str, Any] = {
            "sample_size": 16,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        }
        size["block_out_channels"] = (16, 16, 32, 32)
    model = UNet2DConditionModel(**size).to(torch.bfloat16).to(device).eval()
    side = size["sample_size"]
    latents = torch.randn(2, 4, side, side, dtype=torch.bfloat16).to(device)
    condition = torch.randn(2, 77, size["cross_attention_dim"], dtype=torch.bfloat16).to(device)
    time = torch.tensor([500, 500]).to(device)

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal latents
        predicted = workload.model(latents, time, encoder_hidden_states=condition).sample
        latents = latents - 0.05 * predicted
        return predicted.float().square().mean()

    workload = Workload("sd_unet", model, step)
    return workload


MODELS: dict[str, Callable[[Device, bool], Workload]] = {
    "gpt2_124m": gpt2_124m,
    "resnet50": resnet50,
    "llama_blocks": llama_blocks,
    "sd_unet": sd_unet,
}
