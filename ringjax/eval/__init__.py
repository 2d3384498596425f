"""Evaluation of long contexts: retrieval, perplexity by position, caches."""

from ringjax.eval.cache_kinds import KindCost, compare_caches
from ringjax.eval.needle import Cell, find
from ringjax.eval.perplexity import Curve, perplexity, reader

__all__ = [
  "Cell",
  "Curve",
  "KindCost",
  "compare_caches",
  "find",
  "perplexity",
  "reader",
]
