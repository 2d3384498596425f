"""How many tokens of a draft its target accepts, by the target's positions.

Guarantees: the texts are the target's own greedy ones, so that a draft is right
where its likeliest token is the text's, and a chain of drafts from any token is
that of decoding with it: every token of a text counts as a beginning.
Cost: for each distance a prompt and the steps of a text; then a pass of target
and draft for each place in a draft.
Ref: Yang et al. 2025, arXiv 2502.17421, of drafts at positions that they have
not seen in training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ringjax.checks import integer, positive_int
from ringjax.errors import DataError
from ringjax.eval.finite_losses import check_losses
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import forward
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.parallel.place import sequence_axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAcceptance:
  """What a target accepts of a draft, at some distance from the beginning.

  Attributes:
    offset: by which tokens behind the first ones were moved on.
    rates: for each place in a draft, how often it is right behind right ones.
    tokens_per_call: new tokens of a call of the target with such drafts.
    loss: of the target on the prompts, nats a token: what it still makes of
      texts at these positions.
    tokens: of all texts, each of which begins a draft.
  """

  offset: int
  rates: tuple[float, ...]
  tokens_per_call: float
  loss: float
  tokens: int

  @property
  def acceptance(self) -> float:
    """Accepted tokens of a draft over all its tokens."""
    return (self.tokens_per_call - 1) / len(self.rates)


def draft_acceptance(
  draft: DraftTransformer,
  texts: Sequence[Int[np.ndarray, " _"] | Sequence[int]],
  *,
  offsets: Sequence[int] = (0, 4096, 16384, 65536),
  tokens: int = 128,
  count: int = 4,
  anchors: int = 4,
  batch: int = 8,
) -> list[DraftAcceptance]:
  """Lets a target go on behind texts, and drafts for each of its tokens.

  Args:
    draft: with its target.
    texts: int [n] ids of the prompts, of which the shortest says how many
      tokens of each are read, from the beginning.
    offsets: by how much all tokens but the first `anchors` are moved on.
    tokens: that the target chooses, greedily.
    count: tokens of a draft.
    anchors: tokens that stay where they are.
    batch: texts that are read together.

  Raises:
    DataError: no text, or one of less than two tokens.
  """
  for offset in offsets:
    integer("offsets", offset, least=0)
  for name, value in (("count", count), ("batch", batch)):
    positive_int(name, value)
  integer("tokens", tokens, least=count + 1)
  size = min(map(len, texts), default=0)
  if size < 2:
    raise DataError(
      "texts",
      f"{len(texts)}, the shortest of {size} tokens",
      "a text at least, of two tokens or more",
      "pass longer texts",
    )
  rows = np.stack([np.asarray(text[:size], np.int32) for text in texts])
  mesh = draft.mesh
  axis = None if mesh is None else sequence_axis(mesh)
  attend = ContextParallel(mesh=mesh, axis=axis)
  decode = CachedAttention(mesh=mesh, axis=axis)
  unit = 2 * attend.size
  found = []
  for offset in offsets:
    index = np.arange(-(-(size + tokens) // unit) * unit, dtype=np.int32)
    pos = np.where(index < anchors, index, index + offset)[None]
    pos = pos.astype(np.int32)
    hits, loss = [], 0.0
    for first in range(0, len(rows), batch):
      part = rows[first : first + batch]
      text, logits = _written(draft, decode, part, pos, tokens)
      part_loss = float(_loss(logits, part))
      last = first + len(part) - 1
      check_losses(part_loss, draft.target, document=first, last=last)
      loss += part_loss
      hits.append(_hits(draft, attend, text, pos, size, count))
    found.append(
      _of_chains(np.concatenate(hits), offset, loss / rows[:, 1:].size)
    )
  return found


def _written(
  draft: DraftTransformer,
  attend: CachedAttention,
  rows: np.ndarray,
  pos: np.ndarray,
  tokens: int,
) -> tuple[np.ndarray, jax.Array]:
  """Rows with the target's tokens behind them, and the rows' logits."""
  target = draft.target
  cache = target.init_cache(len(rows), pos.shape[1], sharding=attend)
  size = rows.shape[1]
  wide = np.broadcast_to(pos, (len(rows), pos.shape[1]))
  logits, cache = target(
    rows, positions=wide[:, :size], cache=cache, attend=attend
  )
  token = jnp.argmax(logits[:, -1], 1).astype(jnp.int32)
  new = _continued(
    target, attend, cache, token, pos[0, size : size + tokens - 1]
  )
  return np.concatenate([rows, np.asarray(token)[:, None], new], 1), logits


@functools.partial(jax.jit, static_argnums=1)
def _continued(
  target: Any,
  attend: CachedAttention,
  cache: Any,
  token: Int[Array, " B"],
  pos: Int[Array, " n"],
) -> Int[Array, "B n"]:
  """The target's greedy tokens behind `token`, whose position is the first."""

  def one(carry: Any, pos: jax.Array) -> Any:
    cache, token = carry
    at = jnp.broadcast_to(pos, token.shape)[:, None]
    logits, cache = forward(
      target, attend, token[:, None], at, jnp.ones_like(at), cache, None, None
    )
    logits = attend.everywhere(logits[:, 0])
    token = jnp.argmax(logits, 1).astype(jnp.int32)
    return (cache, token), token

  return jax.lax.scan(one, (cache, token), pos)[1].T


@jax.jit
def _loss(
  logits: Float[Array, "B T V"], rows: Int[Array, "B T"]
) -> Float[Array, ""]:
  law = jax.nn.log_softmax(logits[:, :-1])
  return -jnp.sum(jnp.take_along_axis(law, rows[:, 1:, None], 2))


def _hits(
  draft: DraftTransformer,
  attend: ContextParallel,
  text: np.ndarray,
  pos: np.ndarray,
  size: int,
  count: int,
) -> np.ndarray:
  """Whether the n-th token of a draft is right, bool [B, beginnings, count]."""
  padded = np.zeros((len(text), pos.shape[1]), np.int32)
  padded[:, : text.shape[1]] = text
  begins = np.arange(size - 1, text.shape[1] - count)
  found = []
  for n in range(count):
    logits = draft(padded, lag=n + 1, positions=pos[0], attend=attend)
    likeliest = np.asarray(jnp.argmax(logits, 2))
    # The n-th drafted token is what follows n tokens behind the beginning.
    found.append(likeliest[:, begins + n] == text[:, begins + n + 1])
  return np.stack(found, 2)


def _of_chains(hits: np.ndarray, offset: int, loss: float) -> DraftAcceptance:
  right = np.cumprod(hits, 2)
  stay = right.reshape(-1, hits.shape[2]).mean(0)
  before = np.append(1.0, stay[:-1])
  rates = np.where(before > 0, stay / np.maximum(before, 1e-9), 0.0)
  return DraftAcceptance(
    offset=offset,
    rates=tuple(rates.tolist()),
    tokens_per_call=float(1 + stay.sum()),
    loss=loss,
    tokens=int(hits.shape[0] * hits.shape[1]),
  )
