"""Texts that a model reads between the steps of its engines, for their numbers.

Guarantees: numbers are those of `rj.infer.TextScorer` for the model: of exact
keys, whatever the kind of the engine's cache. A request that is being answered
waits for one forward pass at most.
Memory: the activations of a forward pass, besides the engine's pool.

Texts are read in passes, which are values like requests: an engine computes a
pass between two of its steps, an `EngineGroup` sends it to all its processes as
an input of their next step, a `ClusterRouter` to one of its instances.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from ringjax.checks import integer, one_of
from ringjax.data.text.special_tokens import TokenIds
from ringjax.infer import inputs
from ringjax.infer.scoring.text_scorer import (
  POOLINGS,
  TextScorer,
  TokenScores,
  text_batches,
)

if TYPE_CHECKING:
  from ringjax.serve.engine import Engine

# Maximum number of tokens of a pass of several texts, for which answers wait.
_PASS_TOKENS, _PASS_TEXTS = 2048, 1024


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextPass:
  """Texts of one forward pass, and the numbers that are wanted of them.

  Attributes:
    texts: Token ids of each text, int32 [T].
    top: Number k of likeliest tokens at each place; for scores.
    pooling: One of `POOLINGS` for embeddings, or "" for scores.
    adapter: Name of an adapter, or "".
  """

  texts: tuple[Int32[np.ndarray, " _"], ...]
  top: int = 0
  pooling: str = ""
  adapter: str = ""

  @property
  def tokens(self) -> int:
    """Number of tokens of all texts."""
    return sum(text.size for text in self.texts)

  def joined(self, values: Sequence[np.ndarray]) -> Shaped[np.ndarray, ...]:
    """Numbers of all texts as one array, float32 [N, ...]."""
    if self.pooling:
      return np.stack(values)
    return np.concatenate(values).astype(np.float32, copy=False)

  def split(self, values: np.ndarray) -> list[Shaped[np.ndarray, ...]]:
    """Numbers of each text from those of `joined`.

    Raises:
      ValueError: If the array has another shape or dtype.
    """
    lengths = [1 if self.pooling else x.size - 1 for x in self.texts]
    # Any width of embeddings: a pass does not know the model's.
    width = values.shape[1:] if self.pooling else (1 + 2 * self.top,)
    shape = (sum(lengths), *width)
    if values.dtype != np.float32 or values.ndim != 2 or values.shape != shape:
      raise ValueError(f"numbers of texts {values.dtype} {values.shape}")
    if self.pooling:
      return [*values]
    return np.split(values, np.cumsum(lengths)[:-1])

  def fields(self) -> dict[str, Any]:
    """The pass as JSON, for other processes."""
    texts = [np.ascontiguousarray(text, "<i4").tobytes() for text in self.texts]
    return {
      "texts": [base64.b64encode(text).decode() for text in texts],
      "top": self.top,
      "pooling": self.pooling,
      "adapter": self.adapter,
    }

  @classmethod
  def of(cls, fields: dict[str, Any]) -> TextPass:
    """Decode the JSON of `fields`.

    Raises:
      OptionError: If a value is out of range.
      KeyError, TypeError, ValueError: If the object is malformed.
    """
    texts = [base64.b64decode(text, validate=True) for text in fields["texts"]]
    pooling = str(fields["pooling"])
    return cls(
      texts=tuple(np.frombuffer(x, "<i4").astype(np.int32) for x in texts),
      top=integer("top", fields["top"], least=0),
      pooling=one_of("pooling", pooling, ("", *POOLINGS)),
      adapter=str(fields["adapter"]),
    )


# Function that computes a pass: float32 [T - 1, 1 + 2 k] of each text, with the
# log-probabilities of its tokens, those of the likeliest ones and their ids; or
# embeddings, float32 [N, D].
ReadPass = Callable[[TextPass], Sequence[np.ndarray]]


class TextRequests:
  """Scores and embeddings of texts by a served model.

  Attributes:
    read: Function that computes a pass.
  """

  def __init__(
    self,
    read: ReadPass,
    vocab: int,
    *,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
  ):
    """Begin without texts.

    Args:
      read: Function that computes a pass.
      vocab: Vocabulary size of the model.
      around: Function of the context in which all passes of a call are read.
    """
    self.read, self._vocab, self._around = read, vocab, around

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
      PeerError: If the processes of the engine fail, or no instance of a
        router reads the texts.
    """
    integer("top", top, least=0, most=self._vocab)
    rows = self._read(texts, on_batch, top=top, adapter=adapter)
    return [_scores_of(row, top) for row in rows]

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
      PeerError: As of `scores`.
    """
    one_of("pooling", pooling, POOLINGS)
    return np.stack(
      self._read(texts, on_batch, pooling=pooling, adapter=adapter)
    )

  def _read(
    self,
    texts: Sequence[TokenIds],
    on_batch: Callable[[int], Any],
    **wanted: Any,
  ) -> list[Shaped[np.ndarray, ...]]:
    """Numbers of each text, pass by pass."""
    rows = [inputs.prompt(ids, self._vocab) for ids in texts]
    results: list[Any] = [None] * len(rows)
    num_read = 0
    batches = text_batches([x.size for x in rows], _PASS_TOKENS, _PASS_TEXTS)
    with self._around():
      for numbers, _ in batches:
        text_pass = TextPass(texts=tuple(rows[n] for n in numbers), **wanted)
        values = self.read(text_pass)
        for number, row in zip(numbers, values, strict=True):
          results[number] = row
        num_read += len(numbers)
        on_batch(num_read)
    return results


class EngineTexts:
  """Forward passes over texts by the model of an engine."""

  def __init__(self, engine: Engine):
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
      batch_texts=_PASS_TEXTS,
      around=engine.between_steps,
    )

  def read(self, text_pass: TextPass) -> list[Shaped[np.ndarray, ...]]:
    """Compute a pass, see `ReadPass`.

    Raises:
      OptionError: If the engine is closed, or has no such adapter.
      PromptError, NotFiniteLogitsError: As of `TextScorer`.
    """
    number = self._engine.adapter_number(text_pass.adapter)
    adapter = number if self._engine.adapters else None
    if text_pass.pooling:
      return [
        *self._scorer.embeddings(
          text_pass.texts, pooling=text_pass.pooling, adapter=adapter
        )
      ]
    scores = self._scorer.scores(
      text_pass.texts, top=text_pass.top, adapter=adapter
    )
    # Ids below 2 ** 24 are exact in float32.
    return [
      np.concatenate(
        [x.logprobs[:, None], x.top_logprobs, x.top_ids.astype(np.float32)], -1
      )
      for x in scores
    ]


def _scores_of(row: Float32[np.ndarray, "n m"], top: int) -> TokenScores:
  """Scores of a text from the numbers of a pass."""
  ids = row[:, 1 + top :].astype(np.int32)
  return TokenScores(row[:, 0], ids, row[:, 1 : 1 + top])
