"""Public path of `torch_xla.core.xla_model`."""
