"""Helpers of benchmarks: settings, contestants, tables, files."""
