"""The loss of a batch, without an array over all tokens and the vocabulary.

Guarantees: sum over tokens of weight * (-log p(label) + z logsumexp^2); its
gradients are those of the plain model, whatever the layout and the mesh.
Memory: the head works on a block of tokens at a time, forward and backward;
no shard holds more of the sequence than its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringjax.kv.base import NoCache
from ringjax.models.checkpoint import cast
from ringjax.models.transformer import Transformer, tokens_of
from ringjax.nn.linear import Head
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.ops.loss import blockwise_cross_entropy
from ringjax.train.batch import Batch


class LossSums(NamedTuple):
  """Of a batch's tokens, float32 [].

  Fields:
    loss: what is minimised, the z-loss included.
    nll: negative log-likelihoods, weighted.
    weight: of the labels.
  """

  loss: jax.Array
  nll: jax.Array
  weight: jax.Array


def sums(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  *,
  z_loss: float = 0.0,
  block: int = 1024,
  dtype: Any = None,
) -> LossSums:
  """The sums of one micro-batch, whose fields are [B, T].

  Args:
    model: float32 parameters, or what they are trained in.
    batch: in the layout's order.
    attend: how its tokens lie on devices.
    z_loss: factor of the squared logsumexp.
    block: tokens of a step of the head, on each shard.
    dtype: of the computation; default: the parameters'.
  """
  each = _losses(model, batch, attend, block, dtype)
  loss = jnp.sum(each(z_loss))
  # Without a z-loss it is the same program, which is then computed once.
  nll = jnp.sum(jax.lax.stop_gradient(each(0.0))) if z_loss else loss
  return LossSums(loss, jax.lax.stop_gradient(nll), jnp.sum(batch.weights))


def each_token(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  *,
  block: int = 1024,
  dtype: Any = None,
) -> jax.Array:
  """Weighted negative log-likelihoods, float32 [B, T], in the layout's order.

  For the arguments see `sums`.
  """
  return _losses(model, batch, attend, block, dtype)(0.0)


def each_token_cached(
  model: Transformer,
  batch: Batch,
  attend: CachedAttention,
  cache: Any,
  length: Any,
  *,
  block: int = 1024,
) -> tuple[jax.Array, Any]:
  """As `each_token`, of tokens that go on behind what a cache holds.

  Args:
    model: that reads.
    batch: with positions and segments, which all rows need.
    attend: how queries visit the cache.
    cache: what came before.
    length: int32 [], tokens of the whole text.
    block: tokens of a step of the head, on each shard.

  Returns:
    Losses, float32 [B, T], and the cache with these tokens.
  """
  places = tokens_of(
    model, attend, batch.tokens.shape, batch.positions, batch.segments, length
  )
  cache = cache.allocate(places.at, replicated=False, sees=True)
  h, cache = model.hidden(batch.tokens, places, cache, attend)
  return _head_losses(model, batch, h, attend, block, 0.0), cache


def _losses(
  model: Transformer,
  batch: Batch,
  attend: ShardingContext,
  block: int,
  dtype: Any,
) -> Callable[[float], jax.Array]:
  """The losses of all tokens, [B, T], by the factor of the z-loss."""
  if dtype is not None:
    model = cast(model, dtype)
  places = tokens_of(
    model, attend, batch.tokens.shape, batch.positions, batch.segments, None
  )
  h, _ = model.hidden(batch.tokens, places, NoCache(len(model.kinds)), attend)
  return lambda z_loss: _head_losses(model, batch, h, attend, block, z_loss)


def _head_losses(
  model: Transformer,
  batch: Batch,
  h: jax.Array,
  attend: ShardingContext,
  block: int,
  z_loss: float,
) -> jax.Array:
  """Weighted losses [B, T] of hidden states [B, T, D]."""
  h, w = _head(model, h)
  # Each step brings the whole head to every shard: few of them, in each of
  # which a shard has as much to do as it would have alone.
  if attend.sharded:
    block *= attend.size
  return blockwise_cross_entropy(
    h,
    w,
    batch.labels,
    batch.weights,
    block,
    logits_soft_cap=model.config.logit_cap,
    z_loss=z_loss,
  )


def _head(model: Transformer, h: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(h [B, T, D], W [D, V]) of which the logits are the product."""
  if model.config.logit_scale != 1.0:
    h = h * jnp.asarray(model.config.logit_scale, h.dtype)
  head = model.head
  if head is None:
    return h, model.embed.weight[...].T
  w = head.weight[...]
  if isinstance(head, Head) and head.bias is not None:
    # A bias is one more row of the matrix, behind a hidden state of one.
    bias = head.bias[...].astype(w.dtype) * jnp.asarray(
      model.config.logit_scale, w.dtype
    )
    h = jnp.concatenate([h, jnp.ones_like(h[..., :1])], -1)
    w = jnp.concatenate([w, bias[None]], 0)
  return h, w
