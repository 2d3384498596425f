"""Mooncake: a chunked prefill pipeline over processes."""
