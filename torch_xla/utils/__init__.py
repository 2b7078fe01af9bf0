"""Helpers with public paths."""
