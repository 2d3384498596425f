"""Layers that attend."""
