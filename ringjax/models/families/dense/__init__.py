"""Families without mixtures or states."""
