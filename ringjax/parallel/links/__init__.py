"""Connections between processes: messages, heartbeats, and who is lost."""
