"""Programs compiled for a TPU or GPU without one."""
