"""Settings of torch_xla 2 for `torch.compile`."""

# No effect: inputs may be pending here, and are not looked at before a call.
skip_input_data_check = False
