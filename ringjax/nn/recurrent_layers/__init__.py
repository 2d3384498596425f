"""Layers with a recurrent state."""
