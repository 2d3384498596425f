"""Contexts in which a token's numbers are the same in training and serving.

Guarantees: products of tokens and weights are made in tiles of `TILE` tokens,
and attention folds keys as `PoolOrder` does, whatever the call is: a training's
forward pass, a chunk of a prompt or the next tokens of answers. On a CPU a
float32 model of attention and dense feedforwards gives a token the same bits in
all of them, as far as the compiler keeps the order of the sums in a tile: tests
of up to 32 rows and a training of 32 rows of 230 tokens find no difference.
Elsewhere, and in layers that do not pass tokens through `rows` (experts,
recurrences), numbers are the same up to rounding.
Cost: the forward pass reads the weights once for each tile, of which each call
has two or more. Gradients are those of the whole products, at the same inputs.

XLA's CPU compiler sums the terms of a product in an order that depends on the
number of its rows, but from 64 rows on, so tiles are smaller than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  RowwiseLayer,
  ShardingContext,
)
from ringjax.ops.attention.cached.pool_order import PoolOrder
from ringjax.ops.attention.strategies.ring import Ring
from ringjax.ops.attention.strategies.strategy import Strategy

# Tokens of a product.
TILE = 16


class _InTiles(ShardingContext):
  """Functions of tokens in tiles of `TILE` tokens."""

  def rows(self, f: Callable[[Array], Any], x: Shaped[Array, "B T *d"]) -> Any:
    return _of_tiles(super().rows(f, x), f, x)

  def head(
    self, f: Callable[[Array], Array], h: Shaped[Array, "B n *d"]
  ) -> Shaped[Array, "B n ..."]:
    return _of_tiles(f(h), f, h)

  def rowwise(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> Shaped[Array, "B T ..."]:
    return _of_tiles(super().rowwise(f, x), f, x)

  def summed(
    self, f: Callable[[Array], Array], x: Shaped[Array, "B T *d"]
  ) -> Shaped[Array, "B T ..."]:
    return _of_tiles(super().rows(f, x), f, x)

  def summed_rowwise(
    self, layer: RowwiseLayer, x: Shaped[Array, "B T D"]
  ) -> Shaped[Array, "B T D"]:
    return _of_tiles(super().summed_rowwise(layer, x), layer.row, x)

  def token_map(self, f: Callable[..., Any], *arrays: PyTree) -> Any:
    """f of trees of arrays [B, T, ...] that acts on each token: norms, sums."""
    return _of_tiles(f(*arrays), f, *arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneOrderParallel(_InTiles, ContextParallel):
  """Tokens of a training's batch, whose first ones begin their rows."""

  strategy: Strategy = Ring(PoolOrder())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneOrderCached(_InTiles, CachedAttention):
  """Tokens of an engine's calls, over the pages of its pool."""

  local: Any = PoolOrder()


def _of_tiles(whole: PyTree, f: Callable[..., Any], *arrays: PyTree) -> Any:
  """f(*arrays) in tiles of tokens, with the gradient of `whole`, the same.

  Args:
    whole: f(*arrays), whose gradient is taken. Its numbers are not used.
    f: Function that acts on each token.
    *arrays: Trees of arrays [B, T, ...].
  """
  batch, length = jax.tree.leaves(arrays)[0].shape[:2]
  count = batch * length
  # A loop over a single tile is none to the compiler, which would fuse what is
  # around it: other sums.
  rows = TILE * max(2, -(-count // TILE))

  def cut(x: jax.Array) -> jax.Array:
    flat = lax.stop_gradient(x).reshape(count, *x.shape[2:])
    padding = [(0, rows - count)] + [(0, 0)] * (flat.ndim - 1)
    return jnp.pad(flat, padding).reshape(-1, 1, TILE, *x.shape[2:])

  tiles = jax.tree.map(cut, arrays)
  results = lax.map(lambda tile: f(*tile), tiles)

  def valued(whole: jax.Array, result: jax.Array) -> jax.Array:
    flat = result.reshape(-1, *whole.shape[2:])[:count]
    return _with_values(whole, flat.reshape(whole.shape))

  return jax.tree.map(valued, whole, results)


@jax.custom_vjp
def _with_values(whole: jax.Array, exact: jax.Array) -> jax.Array:
  """`exact`, with the gradient of `whole`, an equal array up to rounding."""
  del whole
  return exact


_with_values.defvjp(lambda whole, exact: (exact, None), lambda _, g: (g, None))
