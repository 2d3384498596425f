"""Sums over a layer's tokens that training and reports read."""
