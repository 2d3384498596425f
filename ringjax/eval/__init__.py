"""Evaluation of long contexts: retrieval, perplexity by position, caches."""

from ringjax.eval.answers import AnswerScore, answer_score
from ringjax.eval.cache_kinds import KindCost, compare_caches
from ringjax.eval.family_errors import (
  RANDOM_FAMILIES,
  FamilyError,
  family_errors,
)
from ringjax.eval.needle import Cell, find
from ringjax.eval.perplexity import Curve, perplexity, reader

__all__ = [
  "RANDOM_FAMILIES",
  "AnswerScore",
  "Cell",
  "Curve",
  "FamilyError",
  "KindCost",
  "answer_score",
  "compare_caches",
  "family_errors",
  "find",
  "perplexity",
  "reader",
]
