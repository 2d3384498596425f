"""Sparse attention: choose keys, then attend to them."""
