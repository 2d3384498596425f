"""Layers that are added to a model to predict further tokens."""
