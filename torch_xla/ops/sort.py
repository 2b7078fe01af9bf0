"""Lowering rules: sort."""
