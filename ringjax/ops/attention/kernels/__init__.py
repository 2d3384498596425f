"""Kernels that may stand inside of a strategy, beside `Blockwise`."""
