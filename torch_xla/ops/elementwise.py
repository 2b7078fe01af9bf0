"""Lowering rules: elementwise."""
