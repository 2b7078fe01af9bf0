"""Lowering rules: pool."""
