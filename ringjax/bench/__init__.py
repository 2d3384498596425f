"""Benchmarks of attention, layouts, models, training and serving.

A checkout runs them: `python -m launch.bench NAME`, for instance attention.
"""
