"""A model's weights as codes, on the host, on disk, or sparse."""
