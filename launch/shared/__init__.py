"""Helpers of the scripts: flags, console, prompts, ranks."""
