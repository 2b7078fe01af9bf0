"""The package under the name that it had first; its modules are those of `torch_xla`."""
