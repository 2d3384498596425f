"""Parts of launch.serve."""
