"""Predicted times of attention calls, for strategy="auto"."""
