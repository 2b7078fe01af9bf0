"""Many architectures of transformers and samplers of diffusers against the CPU; `python -m models` is the command."""
