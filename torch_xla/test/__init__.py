"""Helpers of test and training scripts."""
