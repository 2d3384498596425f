"""LoongServe: a scheduler of elastic groups, simulated and live."""
