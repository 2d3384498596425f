"""Losses of indexes that choose keys."""
