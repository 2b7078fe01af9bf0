"""Public path of the metrics."""
