"""The own tests of torch_xla 2.9, run against this package; `python -m conformance` is the command."""
