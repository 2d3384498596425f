"""How well a model uses its context: what it finds, what it foretells."""

from ringjax.eval.needle import Cell, find
from ringjax.eval.perplexity import Curve, perplexity, reader

__all__ = ["Cell", "Curve", "find", "perplexity", "reader"]
