"""Kernels that may replace `Blockwise` inside a strategy."""
