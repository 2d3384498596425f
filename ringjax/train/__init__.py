"""Training: steps over sharded sequences."""
