"""Hugging Face model folders: read, checked and written."""
