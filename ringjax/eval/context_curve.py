"""The loss of a continuation, by how many chunks of context an encoder reads.

Guarantees: the continuations are the same tokens for each number of chunks, and
the chunks are those just before them.
Cost: one forward pass of the decoder over the continuations for each number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.checks import integer, positive_int
from ringjax.errors import DataError, OptionError
from ringjax.models.cepe import CepeTransformer
from ringjax.nn.sharding_context import ContextParallel
from ringjax.parallel.place import sequence_axis
from ringjax.train.batch import Batch, Chunks
from ringjax.train.objective import each_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCurve:
  """Mean losses of continuations.

  Attributes:
    chunks: how many the encoder read.
    losses: nats a token, for each number of chunks.
    own: the loss where the encoder reads the continuation itself, as in
      CEPE's warm-up.
    chunk: tokens of each.
    tokens: of each continuation.
    texts: how many continuations there were.
  """

  chunks: tuple[int, ...]
  losses: tuple[float, ...]
  own: float
  chunk: int
  tokens: int
  texts: int

  def __str__(self) -> str:
    rows = zip(self.chunks, self.losses, strict=True)
    lines = [f"{k:>8} {k * self.chunk:>8} {loss:>8.4f}" for k, loss in rows]
    head = f"{'chunks':>8} {'tokens':>8} {'nats':>8}"
    return "\n".join([head, *lines, f"{'itself':>17} {self.own:>8.4f}"])


def context_curve(
  model: Any,
  texts: Sequence[Any],
  *,
  chunks: Sequence[int] = (0, 4, 8, 16, 32),
  chunk: int | None = None,
  tokens: int = 256,
  batch: int = 4,
) -> ContextCurve:
  """Reads the ends of texts behind more and more of what is before them.

  Args:
    model: with an encoder.
    texts: int [n] ids of each.
    chunks: numbers of chunks.
    chunk: tokens of each; default: the longest that the encoder reads.
    tokens: of the continuation.
    batch: texts that are read together.

  Raises:
    OptionError: a model without an encoder, or longer chunks than it reads.
    DataError: no text, or one that is too short for the most chunks.
  """
  for k in chunks:
    integer("chunks", k, least=0)
  positive_int("tokens", tokens)
  if not isinstance(model, CepeTransformer):
    raise OptionError(
      "model",
      f"a {model.config.family} without an encoder",
      "a model with an encoder",
      "train one: configs/train/cepe.py",
    )
  most = model.encoder_config.chunk
  size = integer("chunk", most if chunk is None else chunk, least=1, most=most)
  least = max(max(chunks) * size + tokens + 1, size)
  short = [n for n, text in enumerate(texts) if len(text) < least]
  if short or not len(texts):
    raise DataError(
      "texts",
      f"text {short[0]} of {len(texts[short[0]])} tokens" if short else "none",
      f"texts of at least {least} tokens",
      "pass longer texts, or fewer chunks",
    )
  rows = np.stack([np.asarray(text[-least:], np.int32) for text in texts])
  mesh = model.mesh
  attend = ContextParallel(
    mesh=mesh, axis=None if mesh is None else sequence_axis(mesh)
  )

  def loss(k: int, back: int) -> float:
    """With k chunks that end `back` tokens before the end of the texts."""
    total = 0.0
    for first in range(0, len(rows), batch):
      some = rows[first : first + batch]
      made = _batch(some, k, size, tokens, some.shape[1] - back)
      total += float(_loss(model, attend, made))
    return total / (len(rows) * tokens)

  return ContextCurve(
    chunks=tuple(chunks),
    losses=tuple(loss(k, tokens + 1) for k in chunks),
    own=loss(max(1, tokens // size), 1),
    chunk=size,
    tokens=tokens,
    texts=len(rows),
  )


def _batch(
  rows: np.ndarray, k: int, chunk: int, tokens: int, end: int
) -> Batch:
  """The ends of rows, and the k chunks before token `end` of each."""
  own = rows[:, -tokens - 1 :]
  before = rows[:, end - k * chunk : end].reshape(len(rows), k, chunk)
  context = Chunks(jnp.asarray(before), jnp.ones(before.shape, jnp.int32))
  return Batch(
    jnp.asarray(own[:, :-1]),
    jnp.asarray(own[:, 1:]),
    jnp.ones((len(rows), tokens), jnp.float32),
    context=context if k else None,
  )


@functools.partial(jax.jit, static_argnums=1)
def _loss(model: CepeTransformer, attend: Any, batch: Batch) -> jax.Array:
  return jnp.sum(each_token(model, batch, attend))
