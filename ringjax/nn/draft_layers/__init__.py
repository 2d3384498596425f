"""Layers after those of a model that draft its tokens."""
