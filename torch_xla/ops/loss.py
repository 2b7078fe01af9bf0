"""Lowering rules: loss."""
