"""Caches of keys and values on devices: pytrees that can be traced."""
