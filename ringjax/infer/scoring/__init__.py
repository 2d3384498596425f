"""Texts that are read and not continued."""
