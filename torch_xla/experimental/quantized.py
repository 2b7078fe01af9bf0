"""Registers ``torch.ops.quantized_decomposed``: what PyTorch makes of them is recorded, and computed on the device."""

import torch.ao.quantization.fx._decomposed  # noqa: F401
