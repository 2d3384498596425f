"""Texts packed, assigned and placed as batches."""
