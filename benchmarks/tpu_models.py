"""Programs of real size for `tpu_programs.py`, recorded from models whose weights have no values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MIB = 2**20
CHIPS = 8


@dataclass
class Recorded:
    """A program that is pending.

    Attributes:
        plan: MiB of collectives by kind that theory has, per device.
        held: What must live until it is compiled.
    """

    plan: dict[str, float]
    held: Any


def empty(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of the device; nothing is computed there, so that it takes no memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="xla")


def without_values(model: Any) -> Any:
    """A model that was made on ``meta`` with its parameters on the device; what was one stays one."""
    model.to_empty(device="xla")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def mesh(*shape: int) -> Any:
    """The chips as (fsdp, tensor)."""
    import torch_xla.distributed.spmd as xs

    return xs.Mesh(np.arange(CHIPS), shape, ("fsdp", "tensor"))


def mark(tensor: torch.Tensor, over: Any, *spec: Any) -> torch.Tensor:
    """The tensor, split."""
    import torch_xla.distributed.spmd as xs

    xs.mark_sharding(tensor, over, spec)
    return tensor


def _llama(width: int, inner: int, layers: int, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        return model.to(torch.bfloat16)


def _size(parameters: Iterable[torch.Tensor]) -> float:
    return sum(p.numel() * p.element_size() for p in parameters) / MIB


def _tensor_parallel(model: torch.nn.Module, over: Any) -> None:
    """Rows of matrices into heads and the inner width are split by ``tensor``, columns of those out of them."""
    for name, param in model.named_parameters():
        if param.dim() == 2:
            out = name.endswith(("o_proj.weight", "down_proj.weight"))
            mark(param, over, *(("fsdp", "tensor") if out else ("tensor", "fsdp")))


def _by_rows(out: Any, over: Any) -> None:
    mark(out if isinstance(out, torch.Tensor) else out.logits, over, "fsdp", None, None)


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the state that it has after its first step."""
    for param in model.parameters():
        moments = {name: empty(param.shape, param.dtype) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}


def train_llama(split: str, width: int, inner: int, tied: bool, layers: int = 2, length: int = 2048) -> Recorded:
    """A step of AdamW with one sequence per chip."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    inside = without_values(_llama(width, inner, layers, tied))
    model, plan, rows = inside, {}, 1
    matrices = _size(p for p in inside.parameters() if p.dim() == 2)
    if split == "fsdp":
        rows, over = CHIPS, mesh(CHIPS, 1)
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
        model = SpmdFullyShardedDataParallel(inside, mesh=over, auto_wrap_policy=policy, shard_output=_by_rows)
        plan = {"all-gather": 2 * matrices, "reduce-scatter": matrices / CHIPS}
    elif split == "tensor":
        rows, over = CHIPS, mesh(CHIPS // 2, 2)
        _tensor_parallel(inside, over)
        for layer in inside.model.layers:
            layer.register_forward_hook(lambda module, args, out: _by_rows(out, over))
        activation = rows / over.mesh_shape[0] * length * width * 2 / MIB
        plan = {
            "all-gather": 2 * matrices / 2,
            "reduce-scatter": matrices / CHIPS,
            "all-reduce": 4 * layers * activation,
        }
    tokens = empty((rows, length), torch.int64)
    if split:
        mark(tokens, over, "fsdp", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stepped(model, optimizer)
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    del logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return Recorded(plan, [model, optimizer, loss])


def decode_llama(split: str, rows: int = 8, length: int = 2048, layers: int = 2) -> Recorded:
    """A token for each of some sequences, with a static cache."""
    from transformers import StaticCache

    model = without_values(_llama(4096, 14336, layers, tied=False)).eval()
    cache = StaticCache(config=model.config, max_cache_len=length)
    plan = {}
    if split:
        over = mesh(1, CHIPS)
        _tensor_parallel(model, over)
        plan = {"all-reduce": (2 * layers + 1) * rows * 4096 * 2 / MIB}
    layers_of: Any = cache.layers
    for layer in layers_of:
        keys = empty((rows, 8, length, 128))
        layer.lazy_initialization(keys, keys)
        layer.keys, layer.values = empty(keys.shape), empty(keys.shape)
        layer.cumulative_length = empty((), torch.int64)
        if split:
            mark(layer.keys, over, None, "tensor", None, None)
            mark(layer.values, over, None, "tensor", None, None)
    tokens = empty((rows, 1), torch.int64)
    with torch.no_grad():
        following = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
    return Recorded(plan, [model, cache, following])


def denoise_sdxl(split: str) -> Recorded:
    """A step of Stable Diffusion XL's UNet for an image of 1024 × 1024 with guidance; split, one on each chip."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model: Any = UNet2DConditionModel(
            sample_size=128,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
            transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        )  # fmt: skip
        model = model.to(torch.bfloat16)
    without_values(model).eval()
    rows = 2 * CHIPS if split else 2
    latents, text = empty((rows, 4, 128, 128)), empty((rows, 77, 2048))
    more = {"text_embeds": empty((rows, 1280)), "time_ids": empty((rows, 6))}
    if split:
        over = mesh(CHIPS, 1)
        for given in (latents, text, *more.values()):
            mark(given, over, "fsdp", *[None] * (given.dim() - 1))
    with torch.no_grad():
        noise = model(latents, empty((), torch.int64), encoder_hidden_states=text, added_cond_kwargs=more).sample
    return Recorded({}, [model, noise])


def denoise_flux(split: str, blocks: int = 2) -> Recorded:
    """A step of some blocks of both kinds of Flux, for an image of 1024 × 1024; split by heads."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(
            num_layers=blocks, num_single_layers=blocks, attention_head_dim=128, num_attention_heads=24,
            joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True,
        )  # fmt: skip
        model = model.to(torch.bfloat16)
    without_values(model).eval()
    plan = {}
    if split:
        over = mesh(1, CHIPS)
        for name, param in model.named_parameters():
            inward = name.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "proj.weight", "proj_mlp.weight"))
            outward = name.endswith(("to_out.0.weight", "to_add_out.weight", "net.2.weight", "proj_out.weight"))
            if "blocks" in name and param.dim() == 2 and (inward or outward):
                mark(param, over, *(("tensor", None) if inward else (None, "tensor")))
        # Attention's output and the inner layer's, of image and text; a single block has one product for both.
        plan = {"all-reduce": 3 * blocks * (4096 + 512) * 3072 * 2 / MIB}
    with torch.no_grad():
        noise = model(
            hidden_states=empty((1, 4096, 64)), encoder_hidden_states=empty((1, 512, 4096)),
            pooled_projections=empty((1, 768)), timestep=empty((1,)), guidance=empty((1,)),
            img_ids=empty((4096, 3)), txt_ids=empty((512, 3)),
        ).sample  # fmt: skip
    return Recorded(plan, [model, noise])


def flash(split: str, backward: bool) -> Recorded:
    """Attention of 4 sequences of 2,048 tokens."""
    from torch_xla.experimental.custom_kernel import flash_attention

    q, k, v = (empty((4, 32, 2048, 128)).requires_grad_(backward) for _ in range(3))
    spec = (None, "tensor", None, None)
    spread(split, (q, k, v), (spec,) * 3)
    options = {"partition_spec": spec, "mesh": mesh(1, CHIPS)} if split else {}
    out = flash_attention(q, k, v, causal=True, sm_scale=128**-0.5, **options)
    if not backward:
        return Recorded({}, [out])
    return Recorded({}, list(torch.autograd.grad(out.float().sum(), (q, k, v))))


def splash(split: str) -> Recorded:
    """The same under JAX's name, with a window."""
    from torch_xla.experimental.splash_attention import SplashAttentionConfig, splash_attention

    config = SplashAttentionConfig(attentiontype_local_sliding=True, slide_window_size=512)
    q, k, v = (empty((4, 32, 2048, 128)).requires_grad_() for _ in range(3))
    out = splash_attention(q, k, v, config.to_json())
    return Recorded({}, list(torch.autograd.grad(out.float().sum(), (q, k, v))))


def paged(split: str) -> Recorded:
    """Attention of a token each of 16 sequences of up to 1,024."""
    import torch_xla.experimental.custom_kernel  # noqa: F401

    q, pages = empty((16, 32, 128)), empty((8, 1024, 16, 128))
    spread(split, (q, pages), ((None, "tensor", None), ("tensor", None, None, None)))
    lengths, indices = empty((16,), torch.int32), empty((16, 64), torch.int32)
    return Recorded({}, [torch.ops.xla.paged_attention(q, pages, pages, lengths, indices, 4)])


def ragged(split: str) -> Recorded:
    """Attention of 128 tokens of 16 sequences of up to 1,024."""
    import torch_xla.experimental.custom_kernel  # noqa: F401

    q, pages = empty((128, 32, 128)), empty((1024, 16, 16, 128))
    spread(split, (q, pages), ((None, "tensor", None), (None, None, "tensor", None)))
    numbers = [empty(shape, torch.int32) for shape in ((16,), (16, 64), (17,), (1,))]
    return Recorded({}, [torch.ops.xla.ragged_paged_attention(q, pages, *numbers)])


def pallas(split: str) -> Recorded:
    """A kernel of JAX's own, as a user has it."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    from torch_xla.experimental.custom_kernel import make_kernel_from_pallas

    call = make_kernel_from_pallas(flash_attention, lambda q, k, v: [(q.shape, q.dtype)])
    return Recorded({}, [call(*(empty((4, 32, 2048, 128)) for _ in range(3)))])


def quantized(split: str, **options: Any) -> Recorded:
    """Eight rows times a matrix of the 8B Llama in integers."""
    import torch_xla.experimental.xla_quantized_matmul  # noqa: F401

    blocks = options.get("block_size", -1)
    x, scale = empty((8, 4096)), empty((14336,) if blocks < 0 else (4096 // blocks, 14336))
    weight = empty((14336, 4096) if blocks < 0 else (4096 // blocks, blocks, 14336), torch.int8)
    spread(
        split,
        (weight, scale),
        (("tensor", None), ("tensor",)) if blocks < 0 else ((None, None, "tensor"), (None, "tensor")),
    )
    zero = scale if options.pop("zeros", False) else None
    return Recorded({}, [torch.ops.xla.quantized_matmul(x, weight, scale, zero, **options)])


def spread(split: str, tensors: Sequence[torch.Tensor], specs: Sequence[Any]) -> None:
    """Splits tensors over the chips by axis ``tensor``, if at all."""
    if split:
        over = mesh(1, CHIPS)
        for tensor, spec in zip(tensors, specs, strict=True):
            mark(tensor, over, *spec)


# By name, how a program is recorded and over which axes it is split.
PROGRAMS: dict[str, tuple[Callable[[str], Recorded], tuple[str, ...]]] = {
    "attention": (functools.partial(flash, backward=False), ("tensor",)),
    "attention and gradients": (functools.partial(flash, backward=True), ("tensor",)),
    "windowed attention and gradients": (splash, ()),
    "paged attention": (paged, ("tensor",)),
    "ragged paged attention": (ragged, ("tensor",)),
    "Pallas kernel of JAX's": (pallas, ()),
    "int8 weights": (quantized, ("tensor",)),
    "int8 weights and zero points": (functools.partial(quantized, zeros=True), ()),
    "int8 weights and rows": (functools.partial(quantized, quantize_activation=True), ()),
    "int8 weights in blocks": (functools.partial(quantized, block_size=128), ("tensor",)),
    "int4 weights": (functools.partial(quantized, int4_weight=True), ()),
    "int4 weights in blocks": (functools.partial(quantized, int4_weight=True, block_size=128), ()),
    "Llama 8B, 2 layers: a token": (decode_llama, ("tensor",)),
    "Llama 1B, 2 layers: a step": (
        functools.partial(train_llama, width=2048, inner=8192, tied=True), ("fsdp", "tensor"),
    ),
    "Llama 8B, 2 layers: a step": (
        functools.partial(train_llama, width=4096, inner=14336, tied=False), ("fsdp", "tensor"),
    ),
    "Flux, 2 + 2 blocks": (denoise_flux, ("tensor",)),
    "Stable Diffusion XL's UNet": (denoise_sdxl, ("data",)),
}  # fmt: skip
