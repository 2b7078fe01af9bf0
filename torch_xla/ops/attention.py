"""Lowering rules: attention."""
