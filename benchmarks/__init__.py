"""Workloads and measurements; `python -m benchmarks.run` prints them all."""
