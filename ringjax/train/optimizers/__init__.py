"""Transformations of gradients that optax lacks, and of their moments."""
