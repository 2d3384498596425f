"""Benchmarks of engines, stores and transfers."""
