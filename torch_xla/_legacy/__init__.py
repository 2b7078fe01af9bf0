"""Has private and older names of torch_xla 2.9, which this package itself does not use.

`xlac` is the original's extension module under its path `torch_xla._XLAC`, `splits` that module's functions on splits,
`xla_op` and `xla_shape` the operations and shapes of `torch_xla.core.xla_builder`, and `metrics_compare` the module
`torch_xla.debug.metrics_compare_utils`. Each is thin, over what there is; new code has no reason to import from here.
"""
