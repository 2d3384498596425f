"""Benchmarks of attention."""
