"""Benchmarks of drafting."""
