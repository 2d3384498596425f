"""Benchmarks: how fast attention is, and how level a layout's work.

Run them as `python -m launch.bench attention` and `... layouts`.
"""
