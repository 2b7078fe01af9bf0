"""Architectures with a few thousand random weights, and a batch for each. None has dropout, so that losses compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

WORDS = 128
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
NARROW = {**GROUPED, "head_dim": 8}
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}
GPT = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}
TWO_STACKS = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SPEECH = {
    **TEXT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    "mask_time_prob": 0.0, "layerdrop": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
FUNNEL = {
    "vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
TOP_2 = {"num_experts_per_tok": 2}


@dataclass(frozen=True)
class Architecture:
    """One model class.

    Attributes:
        config: Name of its configuration class.
        model: Name of the class.
        options: Of the configuration.
        batch: Makes what a training step is given.
    """

    config: str
    model: str
    options: dict[str, Any]
    batch: Callable[[torch.Generator], dict[str, Any]]

    def build(self) -> torch.nn.Module:
        """The model with random weights, the same each time."""
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.options))
        for module in model.modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return model.train()


def _words(generator: torch.Generator, length: int = 16) -> Tensor:
    return torch.randint(6, WORDS, (2, length), generator=generator)


def _length(generator: torch.Generator, least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, (), generator=generator))


def _shortened(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Labels of which the last row has fewer."""
    labels[-1, _length(generator, 2, labels.shape[1]) :] = -100
    return labels


def text(generator: torch.Generator) -> dict[str, Any]:
    """Two sentences, one of them shorter."""
    words = _words(generator)
    mask = torch.ones_like(words)
    mask[1, _length(generator, 8, 15) :] = 0
    return {"input_ids": words, "labels": words.clone(), "attention_mask": mask}


def whole_text(generator: torch.Generator) -> dict[str, Any]:
    words = _words(generator)
    return {"input_ids": words, "labels": words.clone()}


def pair(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _words(generator), "labels": _shortened(_words(generator, 12), generator)}


def _pixels(generator: torch.Generator, size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=generator)


def image(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(generator), "labels": torch.tensor([0, 1])}


def small_image(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(generator, 28), "labels": torch.tensor([0, 1])}


def segments(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(generator), "labels": torch.randint(0, 2, (2, 32, 32), generator=generator)}


def masked_image(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(generator), "noise": torch.rand(2, 16, generator=generator)}


def image_and_text(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _pixels(generator), "input_ids": _words(generator)}


def image_beside_text(generator: torch.Generator) -> dict[str, Any]:
    return {**image_and_text(generator), "return_loss": True}


def image_in_text(generator: torch.Generator) -> dict[str, Any]:
    words = torch.cat([torch.full((2, 16), 5), _words(generator, 8)], 1)
    return {"pixel_values": _pixels(generator), "input_ids": words, "labels": words.clone()}


def sound(generator: torch.Generator) -> dict[str, Any]:
    return {
        "input_values": torch.randn(2, 400, generator=generator),
        "labels": _shortened(_words(generator, 5), generator),
    }


def spectrum(generator: torch.Generator) -> dict[str, Any]:
    features = torch.randn(2, 8, 64, generator=generator)
    return {"input_features": features, "labels": _shortened(_words(generator, 12), generator)}


def series(generator: torch.Generator) -> dict[str, Any]:
    past, future = torch.randn(2, 36, 2, generator=generator).split([32, 4], 1)
    return {"past_values": past, "future_values": future}


def _of(name: str, options: dict[str, Any], task: str = "ForCausalLM", batch: Any = text, **more: Any) -> Architecture:
    return Architecture(f"{name}Config", f"{name}{task}", {**options, **more}, batch)


MASKED, GENERATE, CLASSIFY = "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification"

ARCHITECTURES = [
    _of("Llama", GROUPED),
    _of("Mistral", GROUPED, sliding_window=8),
    _of("Qwen2", GROUPED),
    _of("Qwen3", NARROW),
    _of("Gemma", NARROW),
    _of("Gemma2", NARROW, sliding_window=8),
    Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", {**NARROW, "sliding_window": 8}, text),
    _of("Phi3", GROUPED),
    _of("Olmo2", GROUPED),
    _of("Cohere", GROUPED),
    _of("StableLm", GROUPED),
    _of("GPTNeoX", TEXT),
    _of("GPTNeo", TEXT, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    _of("GPTJ", GPT, n_embd=32, n_positions=64, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    _of("OPT", TEXT, ffn_dim=64, dropout=0.0, word_embed_proj_dim=32),
    _of("Bloom", GPT, hidden_dropout=0.0, attention_dropout=0.0),
    _of("Falcon", TEXT),
    _of("Mixtral", GROUPED, num_local_experts=4),
    _of("Qwen2Moe", GROUPED, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, **TOP_2),
    _of("Olmoe", GROUPED, num_experts=4, **TOP_2),
    _of("GraniteMoe", GROUPED, num_local_experts=4, **TOP_2),
    _of("GptOss", NARROW, num_local_experts=4, sliding_window=8, **TOP_2),
    _of(
        "DeepseekV3", TEXT, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=2,
        topk_group=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=1, **TOP_2,
    ),
    _of(
        "Jamba", GROUPED, num_experts=2, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
    ),
    _of("Mamba", TEXT, state_size=8),
    _of("Mamba2", TEXT, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    _of("RecurrentGemma", TEXT, num_key_value_heads=1, num_hidden_layers=3, lru_width=32, attention_window_size=8),
    _of("Rwkv", TEXT, batch=whole_text, context_length=64, attention_hidden_size=32),
    _of("XLNet", GPT, "LMHeadModel", d_model=32, d_inner=64, dropout=0.0),
    _of("XLM", GPT, "WithLMHeadModel", emb_dim=32, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0),
    _of("Bert", TEXT, MASKED),
    _of("Roberta", TEXT, MASKED),
    _of("DebertaV2", TEXT, MASKED, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _of("Electra", TEXT, MASKED, embedding_size=32),
    _of("Albert", TEXT, MASKED, embedding_size=32),
    _of("DistilBert", TEXT, MASKED, dim=32, n_layers=2, n_heads=4, hidden_dim=64, dropout=0.0),
    _of("ModernBert", TEXT, MASKED, local_attention=8, cls_token_id=1, sep_token_id=2),
    _of("Longformer", TEXT, MASKED, attention_window=8),
    _of("BigBird", TEXT, MASKED, attention_type="original_full"),
    _of("Esm", TEXT, MASKED, position_embedding_type="rotary", mask_token_id=3),
    _of("Funnel", FUNNEL, MASKED),
    _of("T5", TWO_STACKS, GENERATE, pair, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0),
    _of("Bart", TWO_STACKS, GENERATE, pair, max_position_embeddings=64),
    _of(
        "Whisper", TWO_STACKS, GENERATE, spectrum, max_source_positions=32, max_target_positions=64, num_mel_bins=8,
        suppress_tokens=None, begin_suppress_tokens=None,
    ),
    _of("Wav2Vec2", SPEECH, "ForCTC", sound),
    _of("Hubert", SPEECH, "ForCTC", sound),
    _of("ViT", IMAGE, CLASSIFY, image),
    _of("Beit", IMAGE, CLASSIFY, image, use_relative_position_bias=True, drop_path_rate=0.0),
    _of("Dinov2", TEXT, CLASSIFY, small_image, image_size=28, patch_size=7),
    _of("Swin", {}, CLASSIFY, image, image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2],
        window_size=4, drop_path_rate=0.0),
    _of("ConvNext", {}, CLASSIFY, image, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _of(
        "Segformer", {}, "ForSemanticSegmentation", segments, num_encoder_blocks=2, depths=[1, 1],
        hidden_sizes=[8, 16], num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=16, drop_path_rate=0.0,
    ),
    _of(
        "ViTMAE", IMAGE, "ForPreTraining", masked_image, decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=32,
    ),
    _of("Vilt", IMAGE, "Model", image_and_text),
    _of("CLIP", {}, "Model", image_beside_text, text_config={**TEXT, "projection_dim": 16},
        vision_config={**IMAGE, "projection_dim": 16}, projection_dim=16),
    _of("Siglip", {}, "Model", image_beside_text, text_config=TEXT, vision_config=IMAGE),
    _of("Llava", {}, GENERATE, image_in_text, vision_config={"model_type": "clip_vision_model", **IMAGE},
        text_config={"model_type": "llama", **TEXT}, image_token_index=5, image_token_id=5),
    _of("PatchTST", {}, "ForPrediction", series, num_input_channels=2, context_length=32, prediction_length=4,
        patch_length=8, patch_stride=8, d_model=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32),
]  # fmt: skip

LAYERS = 10  # of deep models
_DEPTH = re.compile(r"(num_hidden|decoder_num_hidden|encoder|decoder|num|n)_layers?|depths|block_sizes")


def _deeper(options: dict[str, Any]) -> dict[str, Any]:
    """Options that ask for eight layers wherever they ask for a number of them."""

    def more(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _deeper(value)
        if name == "attention_types":
            return [[kinds, LAYERS // len(kinds)] for kinds, _ in value]
        if not _DEPTH.fullmatch(name):
            return value
        return [LAYERS] * len(value) if isinstance(value, list) else LAYERS

    return {name: more(name, value) for name, value in options.items()}


class _Perceptron(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*parts)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.layers(x) - x) ** 2).mean()}


@dataclass(frozen=True)
class _Perceptrons(Architecture):
    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return _Perceptron(**self.options)


def numbers(generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(4, 16, generator=generator)}


DEEP = [
    *(_Perceptrons("", f"MLP of {layers}", {"layers": layers}, numbers) for layers in (20, 100)),
    _of("GPT2", GPT, "LMHeadModel", n_embd=32, n_positions=64, n_layer=LAYERS),
    *(replace(architecture, options=_deeper(architecture.options)) for architecture in ARCHITECTURES),
]
