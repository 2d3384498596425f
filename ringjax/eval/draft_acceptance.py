"""Number of tokens of a draft that its target accepts, by position offset.

Guarantees: the target generates the texts greedily, so that a drafted token is
right if it equals the text's, and a chain of drafts from any token is that of
decoding with it: a draft begins at every token of a text.
Cost: for each offset a prompt and the decode steps of a text; then a pass of
target and draft for each place in a draft.
Ref: Yang et al. 2025, arXiv 2502.17421, on drafts at positions that they have
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
from ringjax.errors import DataError, OptionError
from ringjax.eval.finite_losses import check_losses
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.parallel.call_sharding import sequence_axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftAcceptance:
  """Acceptance of a draft at some position offset.

  Attributes:
    offset: Offset of the positions of all tokens after the first ones.
    rates: Acceptance rate at each place in a draft, after accepted tokens.
    tokens_per_call: New tokens of a call of the target with such drafts.
    loss: Loss of the target on the prompts at these positions, nats a token.
    tokens: Number of tokens of all texts at which a draft begins.
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
  draft: Transformer,
  texts: Sequence[Int[np.ndarray, " _"] | Sequence[int]],
  *,
  offsets: Sequence[int] = (0, 4096, 16384, 65536),
  tokens: int = 128,
  count: int = 4,
  anchors: int = 4,
  batch: int = 8,
) -> list[DraftAcceptance]:
  """Lets a target continue texts, and drafts from each of its tokens.

  Args:
    draft: Draft model with its target (`DraftTransformer`), or a model with a
      layer that predicts one token further or with an EAGLE-3 head.
    texts: Ids of the prompts, int [n]; as many of each are read as the shortest
      one has.
    offsets: Offsets of the positions of all tokens after the first `anchors`.
    tokens: Number of tokens that the target generates greedily.
    count: Number of tokens of a draft; of a layer or head 1, as further ones
      are not computed for all tokens at once.
    anchors: Number of first tokens whose positions stay.
    batch: Number of texts that are read together.

  Raises:
    DataError: If there is no text, or one has fewer than two tokens.
    OptionError: If the model has nothing to draft with, or `count` is more than
      1 for a layer or head.
  """
  for offset in offsets:
    integer("offsets", offset, least=0)
  for name, value in (("count", count), ("batch", batch)):
    positive_int(name, value)
  integer("tokens", tokens, least=count + 1)
  _check(draft, count)
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
  results = []
  for offset in offsets:
    index = np.arange(-(-(size + tokens) // unit) * unit, dtype=np.int32)
    pos = np.where(index < anchors, index, index + offset)[None]
    pos = pos.astype(np.int32)
    hits, loss = [], 0.0
    for first in range(0, len(rows), batch):
      part = rows[first : first + batch]
      text, logits = _greedy_texts(draft, decode, part, pos, tokens)
      part_loss = float(_loss(logits, part))
      last = first + len(part) - 1
      check_losses(part_loss, _target(draft), document=first, last=last)
      loss += part_loss
      hits.append(_hits(draft, attend, text, pos, size, count))
    results.append(
      _acceptance_of(np.concatenate(hits), offset, loss / rows[:, 1:].size)
    )
  return results


def _check(draft: Transformer, count: int) -> None:
  """Refuses models without a draft, and long drafts of a layer or head."""
  if isinstance(draft, DraftTransformer):
    return
  predicts = draft.config.predicts
  if predicts is None or not predicts.by_token:
    raise OptionError(
      "draft",
      f"a {draft.config.family} without a layer or head that predicts a token "
      "at each token",
      "a draft of LongSpec, a model with an MTP layer or an EAGLE-3 head",
      "add one with rj.models.eagle3.load(folder, model)",
    )
  if count > 1:
    raise OptionError(
      "count",
      f"{count} for a model with a layer or head",
      "1, the first token of a draft",
      "pass count=1, or measure longer ones with launch.bench speculate",
    )


def _target(draft: Transformer) -> Transformer:
  return draft.target if isinstance(draft, DraftTransformer) else draft


def _greedy_texts(
  draft: Transformer,
  attend: CachedAttention,
  rows: np.ndarray,
  pos: np.ndarray,
  tokens: int,
) -> tuple[np.ndarray, jax.Array]:
  """Continues rows greedily; returns the texts and the rows' logits."""
  target = _target(draft)
  cache = target.init_cache(len(rows), pos.shape[1], sharding=attend)
  size = rows.shape[1]
  positions = np.broadcast_to(pos, (len(rows), pos.shape[1]))
  logits, cache = target(
    rows, positions=positions[:, :size], cache=cache, attend=attend
  )
  token = jnp.argmax(logits[:, -1], 1).astype(jnp.int32)
  new = _greedy_tokens(
    target, attend, cache, token, pos[0, size : size + tokens - 1]
  )
  return np.concatenate([rows, np.asarray(token)[:, None], new], 1), logits


@functools.partial(jax.jit, static_argnums=1)
def _greedy_tokens(
  target: Any,
  attend: CachedAttention,
  cache: Any,
  token: Int[Array, " B"],
  pos: Int[Array, " n"],
) -> Int[Array, "B n"]:
  """Greedy tokens of the target after `token`, which is at `pos[0]`."""

  def decode_step(carry: Any, pos: jax.Array) -> Any:
    cache, token = carry
    at = jnp.broadcast_to(pos, token.shape)[:, None]
    logits, cache = forward(
      target, attend, token[:, None], at, jnp.ones_like(at), cache, None, None
    )
    logits = attend.everywhere(logits[:, 0])
    token = jnp.argmax(logits, 1).astype(jnp.int32)
    return (cache, token), token

  return jax.lax.scan(decode_step, (cache, token), pos)[1].T


@jax.jit
def _loss(
  logits: Float[Array, "B T V"], rows: Int[Array, "B T"]
) -> Float[Array, ""]:
  law = jax.nn.log_softmax(logits[:, :-1])
  return -jnp.sum(jnp.take_along_axis(law, rows[:, 1:, None], 2))


def _hits(
  draft: Transformer,
  attend: ContextParallel,
  text: np.ndarray,
  pos: np.ndarray,
  size: int,
  count: int,
) -> np.ndarray:
  """Whether each drafted token is right, bool [B, beginnings, count]."""
  padded = np.zeros((len(text), pos.shape[1]), np.int32)
  padded[:, : text.shape[1]] = text
  begins = np.arange(size - 1, text.shape[1] - count)
  hits = []
  for n in range(count):
    if isinstance(draft, DraftTransformer):
      logits = draft(padded, lag=n + 1, positions=pos[0], attend=attend)
    else:
      logits = draft.predicted_logits(padded, positions=pos[0], attend=attend)
    likeliest = np.asarray(jnp.argmax(logits, 2))
    # The n-th drafted token predicts the one n + 1 after the beginning.
    hits.append(likeliest[:, begins + n] == text[:, begins + n + 1])
  return np.stack(hits, 2)


def _acceptance_of(
  hits: np.ndarray, offset: int, loss: float
) -> DraftAcceptance:
  right = np.cumprod(hits, 2)
  stay = right.reshape(-1, hits.shape[2]).mean(0)
  previous = np.append(1.0, stay[:-1])
  rates = np.where(previous > 0, stay / np.maximum(previous, 1e-9), 0.0)
  return DraftAcceptance(
    offset=offset,
    rates=tuple(rates.tolist()),
    tokens_per_call=float(1 + stay.sum()),
    loss=loss,
    tokens=int(hits.shape[0] * hits.shape[1]),
  )
