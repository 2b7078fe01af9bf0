"""Registers ``torch.ops.quantized_decomposed``: what PyTorch makes of them is recorded, and computed on the device."""

from torch_xla._torch_internals import _decomposed  # noqa: F401
