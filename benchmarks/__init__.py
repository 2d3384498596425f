"""Measurements that are too long for tests; not part of the wheel."""
