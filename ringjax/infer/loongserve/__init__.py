"""LoongServe: groups of instances that grow and shrink."""
