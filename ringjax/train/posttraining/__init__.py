"""Losses after pre-training: preferences and others, of labels' log-probs."""
