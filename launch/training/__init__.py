"""Parts of launch.train."""
