"""diffusers pipelines made of small random parts on device xla: the CPU's images, and one graph for all steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)

import torch_xla
from torch_xla._core.compile import cache

SIZE = 8


def coder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=2 * SIZE,
    )  # fmt: skip


def stable_diffusion() -> tuple[DiffusionPipeline, dict[str, Any]]:
    unet = UNet2DConditionModel(
        sample_size=SIZE, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
    )  # fmt: skip
    pipeline = StableDiffusionPipeline(
        unet=unet, vae=coder(), scheduler=DDIMScheduler(clip_sample=False, steps_offset=1), text_encoder=None,
        tokenizer=None, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    words, nothing = torch.randn(2, 1, 6, 16)
    noise = torch.randn(1, 4, SIZE, SIZE)
    return pipeline, {
        "prompt_embeds": words,
        "negative_prompt_embeds": nothing,
        "latents": noise,
        "guidance_scale": 5.0,
    }


def diffusion_transformer() -> tuple[DiffusionPipeline, dict[str, Any]]:
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=SIZE,
        patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip
    transformer.eval()  # it drops labels while training
    return DiTPipeline(transformer=transformer, vae=coder(), scheduler=DDIMScheduler()), {"class_labels": [1, 2]}


def unconditional() -> tuple[DiffusionPipeline, dict[str, Any]]:
    unet = UNet2DModel(
        sample_size=SIZE, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return DDPMPipeline(unet=unet, scheduler=DDPMScheduler()), {}


def run(pipeline: DiffusionPipeline, inputs: dict[str, Any], device: str, steps: int = 3) -> torch.Tensor:
    """One image; the noise that a pipeline draws comes from a generator of the CPU, as diffusers recommends."""
    moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    generator = torch.Generator().manual_seed(3)
    images = pipeline(**moved, generator=generator, num_inference_steps=steps, output_type="np").images
    return torch.as_tensor(images)


@pytest.mark.compiled("it pins the graphs of use, where a small read compiles none", reads=False)
@pytest.mark.parametrize(
    ("build", "graphs"),
    [
        (stable_diffusion, 3),  # before the loop, a step, decoding
        (diffusion_transformer, 3),
        (unconditional, 2),  # a step, the image
    ],
)
@pytest.mark.costs("whole models are compiled")
def test_images_agree_with_the_cpu_and_steps_share_a_graph(
    build: Callable[[], tuple[DiffusionPipeline, dict[str, Any]]], graphs: int, compiles: Any
) -> None:
    torch.manual_seed(1)
    pipeline, inputs = build()
    pipeline.set_progress_bar_config(disable=True)
    expected = run(pipeline, inputs, "cpu")
    assert expected.std() > 1e-3
    pipeline.to("xla")
    with compiles(graphs):
        result = run(pipeline, inputs, "xla")
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)
    with compiles(0):
        run(pipeline, inputs, "xla", steps=6)


def test_a_saved_pipeline_loads_onto_xla(tmp_path: Any) -> None:
    torch.manual_seed(1)
    pipeline, inputs = unconditional()
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to("xla")
    expected = run(pipeline, inputs, "xla")
    pipeline.save_pretrained(tmp_path)
    again = DDPMPipeline.from_pretrained(tmp_path).to("xla")
    again.set_progress_bar_config(disable=True)
    assert torch.equal(run(again, inputs, "xla"), expected)


SAMPLERS = [
    pytest.param(EulerDiscreteScheduler, 1e-4, id="euler", marks=pytest.mark.slow),
    pytest.param(HeunDiscreteScheduler, 1e-4, id="heun", marks=pytest.mark.sweep),
    # Its first steps divide by nearly zero and cut off: on CPUs too float32 is as far from float64.
    pytest.param(DDIMScheduler, 2e-2, id="ddim", marks=pytest.mark.sweep),
    pytest.param(DPMSolverMultistepScheduler, 1e-4, id="dpm", marks=pytest.mark.sweep),
]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of what diffusers does
@pytest.mark.usefixtures("auto_barrier")
@pytest.mark.parametrize(("sampler", "tolerance"), SAMPLERS)
def test_a_loop_without_a_barrier(sampler: Callable[[], Any], tolerance: float, compiles: Any, counted: Any) -> None:
    """Stock samplers, whose steps are found in what is recorded."""
    unet = UNet2DModel(
        sample_size=SIZE, in_channels=1, out_channels=1, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    ).eval()  # fmt: skip
    noise = torch.randn(1, 1, SIZE, SIZE)

    @torch.no_grad()
    def sample(device: str, barrier: bool) -> torch.Tensor:
        model, scheduler = copy.deepcopy(unet).to(device), sampler()
        scheduler.set_timesteps(16)
        x = noise.to(device) * scheduler.init_noise_sigma
        for t in scheduler.timesteps:
            x = scheduler.step(model(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
            if barrier:
                torch_xla.sync()
        return x.cpu()

    with compiles() as marked:
        with_barrier = sample("xla", True)
    cache.clear()
    with compiles() as count, counted("AutoBarrier") as cuts:
        without = sample("xla", False)
    assert cuts.value > 2 and count.value <= marked.value + 2
    expected = sample("cpu", False)
    for got in (with_barrier, without):
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()
