"""Benchmarks of attention, layouts, models, training and serving.

Run them as `python -m launch.bench NAME`, for instance attention or layouts.
"""
