"""Lowering rules, one family of operators per file."""
