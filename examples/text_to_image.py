"""Draws pictures from words with a pipeline of diffusers, unmodified, on device xla.

``--model`` is a folder, or a name such as stable-diffusion-v1-5/stable-diffusion-v1-5 where there is a network; without
it, small random parts are put together, which draw nothing but run the same way. ``--devices N`` deals the prompts out
to N devices, a process each. ``--own-loop`` draws by a loop written out by hand instead of the pipeline's.

Examples::

    python examples/text_to_image.py "a cat" "a dog" --steps 20
    python examples/text_to_image.py "a cat" --scheduler dpm --model /models/sd15 --size 512 --dtype bfloat16
    PJRT_DEVICE=CPU python examples/text_to_image.py "a cat" "a dog" --devices 2
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_xla
import torch_xla.runtime as xr

if __package__:
    from examples import common, diffusion_parts
else:
    import common
    import diffusion_parts

SCHEDULERS = {"ddim": "DDIMScheduler", "dpm": "DPMSolverMultistepScheduler", "euler": "EulerDiscreteScheduler"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=["a photograph of an astronaut riding a horse"])
    parser.add_argument("--model", help="folder or name of a pipeline of diffusers; small random parts by default")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="ddim")
    parser.add_argument("--steps", type=common.positive, default=20)
    parser.add_argument("--size", type=common.positive, help="pixels of a side; the model's own by default")
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=common.positive, default=2, help="how often to draw; the last time is what counts"
    )
    parser.add_argument("--devices", type=common.positive, default=1, help="processes, one per device")
    parser.add_argument("--own-loop", action="store_true", help="denoise in a loop written by hand")
    parser.add_argument("--output", type=Path, default=Path("demo-output/pictures"))
    common.add_peers(parser)
    return parser.parse_args(arguments)


def load(options: argparse.Namespace) -> Any:
    """The pipeline with the scheduler that was asked for, on the CPU."""
    import diffusers

    if options.model is None:
        pipeline = diffusion_parts.pipeline()
        if options.dtype != "float32":  # diffusers warns of each change, of one to the same dtype too
            pipeline = pipeline.to(getattr(torch, options.dtype))
    else:
        try:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            common.refuse(f"{options.model} is no folder of a pipeline and cannot be fetched ({reason}); give a folder")
    scheduler = getattr(diffusers, SCHEDULERS[options.scheduler])
    pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config)
    unit = pipeline.vae_scale_factor * 2 ** (len(pipeline.unet.config.block_out_channels) - 1)
    options.size = options.size or pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    if options.size % unit or options.size < unit:
        common.refuse(f"got --size {options.size}, expected a multiple of {unit}, which the UNet halves evenly")
    return pipeline


def draw(pipeline: Any, prompt: str, options: argparse.Namespace, steps: list[int]) -> Any:
    """A picture as a NumPy array in [0, 1], (size, size, 3); each step adds its number to `steps`."""
    generator = torch.Generator().manual_seed(options.seed)

    def step_done(pipeline: Any, number: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        steps.append(number)
        return tensors

    return pipeline(
        prompt,
        height=options.size,
        width=options.size,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance,
        generator=generator,
        callback_on_step_end=step_done,
        output_type="np",
    ).images[0]


@torch.no_grad()
def draw_by_hand(pipeline: Any, prompt: str, options: argparse.Namespace, steps: list[int]) -> Any:
    """The same by a loop of one's own: text, noise, denoising with guidance, decoding; no barrier anywhere."""
    device, unet, scheduler = pipeline.unet.device, pipeline.unet, pipeline.scheduler
    tokens = pipeline.tokenizer(
        ["", prompt], padding="max_length", max_length=pipeline.tokenizer.model_max_length, truncation=True
    )
    words = pipeline.text_encoder(torch.tensor(tokens.input_ids).to(device))[0]
    side = options.size // pipeline.vae_scale_factor
    shape = (1, unet.config.in_channels, side, side)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(options.seed), dtype=unet.dtype)
    scheduler.set_timesteps(options.steps, device=device)
    latents = noise.to(device) * scheduler.init_noise_sigma
    for number, time_ in enumerate(pipeline.progress_bar(scheduler.timesteps)):
        both = scheduler.scale_model_input(latents.repeat(2, 1, 1, 1), time_)
        without, with_words = unet(both, time_, encoder_hidden_states=words).sample.chunk(2)
        latents = scheduler.step(without + options.guidance * (with_words - without), time_, latents).prev_sample
        steps.append(number)
    image = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    return (image / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).float().cpu().numpy()


def save(image: Any, path: Path) -> None:
    """Writes a picture to a PNG."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 255).round().astype("uint8")).save(path)


def run(index: int, options: argparse.Namespace) -> None:
    """What each process runs: every so-many-th prompt."""
    world, rank = xr.world_size(), xr.global_ordinal()
    own = list(enumerate(options.prompts))[rank::world]
    if not own:
        return
    pipeline = load(options).to(torch_xla.device())
    way = draw_by_hand if options.own_loop else draw
    for round_ in range(options.rounds):
        graphs, began = common.compiles(), time.perf_counter()
        for number, prompt in own:
            steps: list[int] = []
            image = way(pipeline, prompt, options, steps)
            path = options.output / f"{number}.png"
            save(image, path)
            assert steps == list(range(len(pipeline.scheduler.timesteps))), "a callback for every step"
        seconds = (time.perf_counter() - began) / len(own)
        print(
            f"round {round_ + 1} on device {rank}: {len(own)} of {options.size}x{options.size}, {len(steps)} steps, "
            f"{seconds:.2f} s a picture, {common.graphs(common.compiles() - graphs)} compiled; the last is {path}",
            flush=True,
        )


def compare(options: argparse.Namespace) -> None:
    """Times a picture beside PyTorch's own on the CPU."""

    def build(device: str, compiled: bool) -> Callable[[], object]:
        pipeline = load(options).to(device)
        pipeline.set_progress_bar_config(disable=True)
        if compiled:
            pipeline.unet = torch.compile(pipeline.unet)
        return lambda: draw(pipeline, options.prompts[0], options, [])

    common.compare_with_peers(options.peers, {"a picture": build})


def main() -> int:
    """Starts the processes, if there are several."""
    options = parse()
    if options.peers:
        compare(options)
        return 0
    if options.devices > 1 and os.environ.get("PJRT_DEVICE", "CPU") == "CPU":
        os.environ["CPU_NUM_DEVICES"] = str(options.devices)
    if options.devices > 1:
        load(options)  # what cannot be done is told here, once
        from torch_xla.distributed import xla_multiprocessing

        xla_multiprocessing.spawn(run, (options,), nprocs=options.devices)
    else:
        run(0, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
