"""The loss of a continuation, by the number of chunks that an encoder reads.

Guarantees: the continuations are the same tokens for each number of chunks, and
the chunks are those just before them.
Cost: three forward passes of the continuations for each number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.checks import integer, positive_int
from ringjax.errors import DataError, OptionError
from ringjax.eval.finite_losses import check_losses
from ringjax.models.cepe import CepeTransformer
from ringjax.nn.sharding_context import Attend, ContextParallel
from ringjax.parallel.call_sharding import sequence_axis
from ringjax.train.batch import Batch, Chunks
from ringjax.train.objective import each_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCurve:
  """Mean losses of continuations.

  Attributes:
    chunks: Numbers of chunks that the encoder reads.
    losses: Loss for each number of chunks, nats a token.
    as_text: Losses if the decoder reads the tokens of the chunks instead.
    of_another: Losses if the encoder reads chunks of another text.
    own: Loss if the encoder reads the continuation itself, as in CEPE's
      warm-up.
    chunk: Tokens of each chunk.
    tokens: Tokens of each continuation.
    texts: Number of continuations.
  """

  chunks: tuple[int, ...]
  losses: tuple[float, ...]
  as_text: tuple[float, ...]
  of_another: tuple[float, ...]
  own: float
  chunk: int
  tokens: int
  texts: int

  def __str__(self) -> str:
    columns = (self.losses, self.as_text, self.of_another)
    lines = [
      f"{k:>8} {k * self.chunk:>8}" + "".join(f" {x:>10.4f}" for x in row)
      for k, *row in zip(self.chunks, *columns, strict=True)
    ]
    names = ("encoded", "as text", "of another")
    head = f"{'chunks':>8} {'tokens':>8}" + "".join(f" {n:>10}" for n in names)
    return "\n".join([head, *lines, f"{'itself':>17} {self.own:>10.4f}"])


def context_curve(
  model: CepeTransformer,
  texts: Sequence[Any],
  *,
  chunks: Sequence[int] = (0, 4, 8, 16, 32),
  chunk: int | None = None,
  tokens: int = 256,
  batch: int = 4,
) -> ContextCurve:
  """Measures losses of the ends of texts after more and more encoded chunks.

  Args:
    model: Model with an encoder.
    texts: Ids of each text, int [n].
    chunks: Numbers of chunks.
    chunk: Tokens of each chunk; default: the most that the encoder reads.
    tokens: Tokens of the continuation.
    batch: Number of texts that are read together.

  Raises:
    OptionError: If the model has no encoder, or chunks are too long for it.
    DataError: If there is no text, or one is too short for all chunks.
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
  max_chunk = model.encoder_config.chunk
  size = integer(
    "chunk", max_chunk if chunk is None else chunk, least=1, most=max_chunk
  )
  min_tokens = max(max(chunks) * size + tokens + 1, size)
  short = [n for n, text in enumerate(texts) if len(text) < min_tokens]
  if short or not len(texts):
    raise DataError(
      "texts",
      f"text {short[0]} of {len(texts[short[0]])} tokens" if short else "none",
      f"texts of at least {min_tokens} tokens",
      "pass longer texts, or fewer chunks",
    )
  rows = np.stack([np.asarray(text[-min_tokens:], np.int32) for text in texts])
  mesh = model.mesh
  attend = ContextParallel(
    mesh=mesh, axis=None if mesh is None else sequence_axis(mesh)
  )

  others = np.roll(rows, 1, 0)

  def mean(make: Callable[[slice], Batch]) -> float:
    parts = [slice(n, n + batch) for n in range(0, len(rows), batch)]
    total = 0.0
    for part in parts:
      loss = float(_loss(model, attend, make(part)))
      last = min(part.stop, len(rows)) - 1
      check_losses(loss, model, document=part.start, last=last)
      total += loss
    return total / (len(rows) * tokens)

  def loss_after_chunks(k: int, back: int, texts: np.ndarray = rows) -> float:
    """Mean loss after k chunks that end `back` tokens before the text's end."""
    end = min_tokens - back
    context_tokens = texts[:, end - k * size : end]
    return mean(lambda n: _encoded(context_tokens[n], rows[n], tokens, size))

  return ContextCurve(
    chunks=tuple(chunks),
    losses=tuple(loss_after_chunks(k, tokens + 1) for k in chunks),
    as_text=tuple(
      mean(lambda n, k=k: _text(rows[n, -k * size - tokens - 1 :], tokens))
      for k in chunks
    ),
    of_another=tuple(loss_after_chunks(k, tokens + 1, others) for k in chunks),
    own=loss_after_chunks(max(1, tokens // size), 1),
    chunk=size,
    tokens=tokens,
    texts=len(rows),
  )


def _text(rows: np.ndarray, tokens: int) -> Batch:
  """Batch of rows whose last `tokens` tokens have weights."""
  x = jnp.asarray(rows)
  at = np.arange(rows.shape[1] - 1)
  counts = np.float32(at >= len(at) - tokens)
  weights = jnp.broadcast_to(jnp.asarray(counts), x[:, 1:].shape)
  return Batch(x[:, :-1], x[:, 1:], weights)


def _encoded(
  context: np.ndarray, rows: np.ndarray, tokens: int, chunk: int
) -> Batch:
  """Batch of the ends of rows, with chunks for the encoder."""
  batch = _text(rows[:, -tokens - 1 :], tokens)
  if not context.size:
    return batch
  chunks = jnp.asarray(context).reshape(len(rows), -1, chunk)
  return batch._replace(context=Chunks(chunks, jnp.ones_like(chunks)))


@functools.partial(jax.jit, static_argnums=1)
def _loss(model: CepeTransformer, attend: Attend, batch: Batch) -> jax.Array:
  return jnp.sum(each_token(model, batch, attend))
