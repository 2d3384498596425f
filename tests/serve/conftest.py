"""Loaded models, as for the tests of generation."""

from tests.infer.conftest import loaded

__all__ = ["loaded"]
