"""Mixtures of experts: rows sorted by expert, and their products."""
