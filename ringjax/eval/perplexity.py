"""How well a model foretells a text, by how much of it it has seen.

Law: every token of a row counts once, at its position; a bucket goes from the
end of the one before to its own, which is twice that. Rows are whole: no token
has less context than its position says.
Cost: one forward pass a row, without logits of more than a block of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ringjax.errors import PromptError, message
from ringjax.models.transformer import Transformer
from ringjax.nn.spread import Spread, Travel
from ringjax.train.batch import Batch, place, whole_rows
from ringjax.train.objective import each_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """Losses by position.

  Attributes:
    length: T, tokens of a row.
    rows: how many there were.
    ends: of the buckets; a bucket begins where the one before ends.
    nll: mean negative log-likelihood in each bucket, nats a token.
    mean: over all positions.
  """

  length: int
  rows: int
  ends: tuple[int, ...]
  nll: tuple[float, ...]
  mean: float

  @property
  def perplexity(self) -> float:
    """Over all positions."""
    return math.exp(self.mean)

  def record(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "perplexity": self.perplexity}


@functools.partial(jax.jit, static_argnums=(1,))
def _read(model: Transformer, spread: Spread, batch: Batch) -> jax.Array:
  one = jax.tree.map(lambda x: x[0], batch)
  return spread.everywhere(each_token(model, one, spread))


def perplexity(
  model: Transformer,
  documents: Iterable[np.ndarray],
  *,
  length: int,
  rows: int,
  spread: Travel | None = None,
  on_row: Callable[[int], Any] = lambda done: None,
) -> Curve:
  """Reads the beginnings of documents that are long enough.

  Args:
    model: that reads.
    documents: ids [n] of each; shorter ones are passed over.
    length: T, tokens that are read of each, a multiple of twice the shards.
    rows: how many documents are read.
    spread: how tokens lie on devices; default: one device.
    on_row: called with how many rows are read.

  Raises:
    PromptError: not so many documents are long enough.
  """
  spread = Travel() if spread is None else spread
  total, count = np.zeros(length), 0
  for ids in documents:
    if len(ids) <= length:
      continue
    batch = place(whole_rows(ids[None, : length + 1]), spread)
    found = _read(model, spread, batch)
    total += spread.layout.restore(
      np.asarray(found), shards=spread.size, axis=1
    )[0]
    count += 1
    on_row(count)
    if count == rows:
      break
  if count < rows:
    raise PromptError(
      message(
        "documents",
        f"{count} of more than {length} tokens",
        f"{rows}",
        "lower the length or the rows, or bring longer documents",
      )
    )
  each = total / rows
  ends = [1]
  while ends[-1] < length:
    ends.append(min(2 * ends[-1], length))
  starts = [0, *ends[:-1]]
  pieces = [each[a:b] for a, b in zip(starts, ends, strict=True)]
  return Curve(
    length=length,
    rows=rows,
    ends=tuple(ends),
    nll=tuple(float(piece.mean()) for piece in pieces),
    mean=float(each.mean()),
  )
