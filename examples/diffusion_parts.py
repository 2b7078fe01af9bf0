"""A Stable Diffusion pipeline of small random parts, for where there is no network: its pictures show nothing."""

from __future__ import annotations

from typing import Any

import torch

SIZE = 128  # pixels of its pictures


def tokenizer() -> Any:
    """CLIP's tokenizer over single bytes."""
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({word: number for number, word in enumerate(words)}, [], model_max_length=77)


def pipeline(seed: int = 0) -> Any:
    """The pipeline, on the CPU; the same weights for the same seed."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(seed)
    words = tokenizer()
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
        )
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIZE // 8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=64,
    )  # fmt: skip
    coder = AutoencoderKL(
        block_out_channels=(16, 16, 32, 32), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=4, norm_num_groups=8, sample_size=SIZE,
    )  # fmt: skip
    return StableDiffusionPipeline(
        unet=unet, vae=coder, text_encoder=text_encoder, tokenizer=words,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
