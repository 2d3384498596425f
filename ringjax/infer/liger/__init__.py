"""Liger: two batches whose sums and products interleave."""
