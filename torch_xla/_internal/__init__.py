"""Paths inside the original package that other libraries read."""
