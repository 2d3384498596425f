"""Connections between processes: messages, heartbeats, lost members."""
