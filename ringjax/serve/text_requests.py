"""Texts that an engine's model reads between two steps, and does not continue.

Guarantees: numbers are those of `rj.infer.TextScorer` for the engine's model:
of exact keys, whatever the kind of the engine's cache. The weights are the
engine's own. A request that is being answered waits for one forward pass at
most, and not for its compiler.
Memory: the activations of a forward pass, besides the engine's pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32

from ringjax.data.text.special_tokens import TokenIds
from ringjax.infer.scoring.text_scorer import TextScorer, TokenScores

if TYPE_CHECKING:
  from ringjax.serve.engine import Engine

# Maximum number of tokens of a pass of several texts, for which answers wait.
_PASS_TOKENS = 2048


class TextRequests:
  """Scores and embeddings of texts by the model of an engine.

  Attributes:
    width: Number of numbers of an embedding.
  """

  def __init__(self, engine: Engine):
    self.width = engine.model.config.embed
    self._engine = engine

  @functools.cached_property
  def _scorer(self) -> TextScorer:
    """Made when the first text is read: not all models can be read so."""
    engine = self._engine
    return TextScorer(
      engine.model,
      mesh=engine.mesh,
      axis=engine.axis,
      batch_tokens=_PASS_TOKENS,
      around=engine.between_steps,
    )

  def scores(
    self,
    texts: Sequence[TokenIds],
    *,
    top: int = 1,
    adapter: str = "",
    on_batch: Callable[[int], Any] = lambda texts: None,
  ) -> list[TokenScores]:
    """Log-probabilities of texts, see `TextScorer.scores`.

    Args:
      texts: Token ids of each text, int32 [T].
      top: Number of likeliest tokens at each place.
      adapter: Name of one of the engine's adapters, or "".
      on_batch: Function of the number of texts read so far.

    Raises:
      OptionError: If the engine is closed, or has no such adapter.
      PromptError, NotFiniteLogitsError: As of `TextScorer.scores`.
    """
    number = self._number(adapter)
    return self._scorer.scores(
      texts, top=top, adapter=number, on_batch=on_batch
    )

  def embeddings(
    self,
    texts: Sequence[TokenIds],
    *,
    pooling: str = "last",
    adapter: str = "",
    on_batch: Callable[[int], Any] = lambda texts: None,
  ) -> Float32[np.ndarray, "N D"]:
    """Embeddings of texts, float32 [N, D], see `TextScorer.embeddings`.

    Args:
      texts: Token ids of each text, int32 [T].
      pooling: "last" or "mean".
      adapter: Name of one of the engine's adapters, or "".
      on_batch: Function of the number of texts read so far.

    Raises:
      OptionError: If the engine is closed, or has no such adapter.
      PromptError, NotFiniteLogitsError: As of `TextScorer.embeddings`.
    """
    number = self._number(adapter)
    return self._scorer.embeddings(
      texts, pooling=pooling, adapter=number, on_batch=on_batch
    )

  def _number(self, adapter: str) -> int | None:
    """Number of an adapter; None for a model without adapters."""
    number = self._engine.adapter_number(adapter)
    return number if self._engine.adapters else None
