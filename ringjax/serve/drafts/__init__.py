"""Drafted tokens of an engine's rows."""
