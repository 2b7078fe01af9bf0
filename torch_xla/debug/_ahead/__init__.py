"""Runs a script as a TPU slice would have it, on a machine without one, and reports what came of it."""
