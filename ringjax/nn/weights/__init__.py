"""Layers whose weights are codes, adapted, split or elsewhere."""
