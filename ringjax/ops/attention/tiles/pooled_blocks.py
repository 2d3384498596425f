"""Pooled queries and keys of blocks of tokens, and their attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.tiles.tile_pattern import (
  PromptTiles,
  without_padding,
)
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import finite_max, wide_dtype


def block_means(
  x: Float[Array, "B *heads T H"], at: Coords, block: int
) -> Float[Array, "B *heads n H"]:
  """Means of blocks of vectors, without padding."""
  x = without_padding(x, at).astype(wide_dtype(x.dtype))
  sums = x.reshape(*x.shape[:-2], -1, block, x.shape[-1]).sum(-2)
  count = (at.seg != 0).reshape(at.seg.shape[0], -1, block).sum(-1)
  shape = count.shape[0], *(1,) * (sums.ndim - 3), count.shape[1], 1
  return sums / jnp.maximum(count, 1).reshape(shape).astype(sums.dtype)


def pooled_scores(
  x: PromptTiles, q: Float[Array, "B K G m H"], k: Float[Array, "B K n H"]
) -> Float[Array, "B K G m n"]:
  """Scores of pooled queries and keys."""
  s = product("bkgqh,bkth->bkgqt", q, k)
  s = s * jnp.asarray(x.scores.scale, s.dtype)
  if x.scores.soft_cap is not None:
    s = x.scores.soft_cap * jnp.tanh(s / x.scores.soft_cap)
  return s


def masked_softmax(s: Float[Array, "*B n"]) -> Float[Array, "*B n"]:
  """Softmax that is 0 where no key is seen."""
  p: Any = jnp.exp(s - finite_max(jnp.max(s, -1, keepdims=True)))
  total: jax.Array = jnp.sum(p, -1, keepdims=True)
  return p / jnp.where(total == 0, 1, total)
