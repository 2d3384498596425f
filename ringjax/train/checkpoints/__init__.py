"""Checkpoints of a training, by one or many processes."""
