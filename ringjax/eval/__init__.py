"""Evaluation of long contexts: retrieval, perplexity by position, caches,
entropy of attention.
"""

from ringjax.eval.answers import AnswerScore, answer_score
from ringjax.eval.cache_kinds import KindCost, compare_caches
from ringjax.eval.context_costs import (
  ContextCost,
  ContextTrial,
  ContextWay,
  context_answers,
  context_ways,
)
from ringjax.eval.context_curve import ContextCurve, context_curve
from ringjax.eval.draft_acceptance import DraftAcceptance, draft_acceptance
from ringjax.eval.entropy import (
  ModelStatistics,
  SplitEntropy,
  attention_statistics,
  context_statistics,
  correlation,
  split_entropy,
)
from ringjax.eval.family_errors import (
  RANDOM_FAMILIES,
  FamilyError,
  family_errors,
)
from ringjax.eval.needle import Cell, find
from ringjax.eval.page_recall import LayerRecall, PageRecall, page_recall
from ringjax.eval.perplexity import Curve, perplexity, reader

__all__ = [
  "RANDOM_FAMILIES",
  "AnswerScore",
  "Cell",
  "ContextCost",
  "ContextCurve",
  "ContextTrial",
  "ContextWay",
  "Curve",
  "DraftAcceptance",
  "FamilyError",
  "KindCost",
  "LayerRecall",
  "ModelStatistics",
  "PageRecall",
  "SplitEntropy",
  "answer_score",
  "attention_statistics",
  "compare_caches",
  "context_answers",
  "context_curve",
  "context_statistics",
  "context_ways",
  "correlation",
  "draft_acceptance",
  "family_errors",
  "find",
  "page_recall",
  "perplexity",
  "reader",
  "split_entropy",
]
