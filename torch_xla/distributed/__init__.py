"""Public path of the loaders and of starting processes."""
