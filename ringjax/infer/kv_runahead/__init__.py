"""KV-Runahead: prefill by a chain of processes."""
