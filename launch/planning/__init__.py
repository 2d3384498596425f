"""Sub-commands of launch.plan."""
