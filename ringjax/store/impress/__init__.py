"""IMPRESS: the important part of a stored prefix."""
