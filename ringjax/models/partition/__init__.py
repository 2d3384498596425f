"""Parts of a model for several processes."""
