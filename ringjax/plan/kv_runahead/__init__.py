"""KV-Runahead: partitions of a prompt and their schedules."""
