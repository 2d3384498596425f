"""Caches whose keys are partly in host memory or on disk."""
