"""Context parallelism: a strategy a file, and their registry."""
