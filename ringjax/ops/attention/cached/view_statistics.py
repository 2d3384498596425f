"""Statistics of attention over a cache's views, including weighted views.

Guarantees: weights are those by which the partials of the views merge: only of
contexts that a query selects, with temperature and scale where they have them.
A learned sink counts as one more key: it has a share of the entropy, and its
weight is in no mass.
Cost: the scores of all queries and keys once more, and the selection.
Memory: these scores, of one layer.

For measurements on one device; `statistics` has those of a call without a
cache, tile by tile and over shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.cached.cached_attention import CacheVisit
from ringjax.ops.attention.cached.separate_contexts import (
  SelectedView,
  WeighedView,
)
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.scores import (
  FORWARD,
  Context,
  ScoreArgs,
  ScoreTile,
)
from ringjax.ops.attention.statistics import AttentionStatistics
from ringjax.ops.softmax import wide_dtype


def view_statistics(
  visit: CacheVisit,
  views: Sequence[KVView],
  sinks: Float[Array, "K G"] | None,
  before: int,
) -> AttentionStatistics:
  """Statistics [B, T, N] of the queries of a visit over all keys of views.

  Args:
    visit: Queries [B, K, G, T, H], and their score function.
    views: Views of one layer of a cache, on one device.
    sinks: Learned scores of the layer's heads, or None.
    before: Position below which keys count for the kept mass.
  """
  plain_scores = [_scores(x, visit) for x in views if not _is_weighted(x)]
  plain_lse = jax.nn.logsumexp(jnp.concatenate(plain_scores, -1), -1)
  logits = [
    *plain_scores,
    *(_weighted_scores(x, visit, plain_lse) for x in views if _is_weighted(x)),
  ]
  ordered = [x for x in views if not _is_weighted(x)] + [
    x for x in views if _is_weighted(x)
  ]
  kept_keys = [(x.at.pos < before) & (x.at.seg > 0) for x in ordered]
  rows = visit.q.shape[0]
  keep = jnp.concatenate(
    [jnp.broadcast_to(x, (rows, x.shape[1])) for x in kept_keys], 1
  )
  s = jnp.concatenate(logits, -1)
  if sinks is not None:
    sink_scores = jnp.broadcast_to(
      sinks[None, :, :, None, None], (*s.shape[:4], 1)
    )
    s = jnp.concatenate([s, sink_scores.astype(s.dtype)], -1)
    keep = jnp.pad(keep, ((0, 0), (0, 1)))
  lse = jax.nn.logsumexp(s, -1)
  sees_key = lse != -jnp.inf
  p = jnp.exp(s - jnp.where(sees_key, lse, 0)[..., None])
  mean = jnp.sum(jnp.where(p > 0, p * s, 0), -1)
  entropy = jnp.where(sees_key, jnp.maximum(lse - mean, 0), 0)
  mass = jnp.sum(jnp.where(keep[:, None, None, None], p, 0), -1)
  to_query_heads = lambda x: jnp.moveaxis(x, 3, 1).reshape(
    x.shape[0], x.shape[3], -1
  )
  return AttentionStatistics(*map(to_query_heads, (entropy, lse, mass)))


def _is_weighted(view: KVView) -> bool:
  return isinstance(view, SelectedView | WeighedView)


def _scores(view: KVView, visit: CacheVisit) -> jax.Array:
  """Scores [B, K, G, T, S], -inf where a query does not see a key."""
  dtype = wide_dtype(visit.q.dtype)
  k, _ = view.tile(jnp.int32(0), view.shape[2])
  dot = product("bkgqh,bkth->bkgqt", visit.q.astype(dtype), k.astype(dtype))
  context = Context(visit.at, view.at, view.mask or visit.mask)
  args = ScoreArgs(visit.scores, visit.terms, context)
  tile = ScoreTile(args, FORWARD, 0, 0, context.q, context.k)
  s, _ = tile.scores_of(dot)
  return jnp.where(tile.allowed(), s, -jnp.inf)


def _weighted_scores(
  view: KVView, visit: CacheVisit, plain_lse: Float[Array, "B K G T"]
) -> jax.Array:
  """Log weights of a view of `apart`, next to plain keys of lse `plain_lse`."""
  if isinstance(view, WeighedView):
    s = _scores(view, view.cooled(visit))
    lse = jax.nn.logsumexp(s, -1, keepdims=True)
    extra_log_weight = (view.scale.astype(s.dtype) - 1) * lse
    return jnp.where(
      jnp.isfinite(s), s + jnp.where(s > -jnp.inf, extra_log_weight, 0), s
    )
  assert isinstance(view, SelectedView)
  chosen = view.slots_chosen(view.chosen(plain_lse, visit))
  return jnp.where(chosen, _scores(view, visit), -jnp.inf)
