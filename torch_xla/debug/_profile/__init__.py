"""`torch_xla.debug.profile`: collecting, accounting, and what is shown of it."""
