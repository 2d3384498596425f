"""Evaluation of long contexts: passkey retrieval and perplexity by position."""

from ringjax.eval.needle import Cell, find
from ringjax.eval.perplexity import Curve, perplexity, reader

__all__ = ["Cell", "Curve", "find", "perplexity", "reader"]
