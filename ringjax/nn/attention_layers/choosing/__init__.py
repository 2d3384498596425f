"""Attention layers that choose their keys."""
