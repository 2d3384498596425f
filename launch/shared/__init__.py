"""What the scripts share: flags, console, prompts, ranks."""
