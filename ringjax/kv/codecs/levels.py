"""Levels: the numbers that codes of a few bits stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8


def nearest(
  x: Float[Array, "B K T D"], levels: Float[Array | np.ndarray, "*K M"]
) -> UInt8[Array, "B K T D"]:
  """The number of the nearest of the levels [n] or [K, n], which ascend."""
  edges = (levels[..., 1:] + levels[..., :-1]) * np.float32(0.5)
  codes = jnp.zeros(x.shape, jnp.uint8)
  for n in range(edges.shape[-1]):
    codes += (x > _each(edges, n)).astype(jnp.uint8)
  return codes


def lookup(
  codes: UInt8[Array, "B K T D"], levels: Float[Array | np.ndarray, "*K M"]
) -> Float[Array, "B K T D"]:
  """The levels [n] or [K, n] of codes, by a tree of choices.

  A processor's vector unit chooses; it does not load from many places.
  """
  count = levels.shape[-1]
  candidates: list[Any] = [
    jnp.broadcast_to(_each(levels, n), codes.shape) for n in range(count)
  ]
  bit = 0
  while len(candidates) > 1:
    odd = (codes >> np.uint8(bit)) & np.uint8(1) != 0
    pairs = zip(candidates[::2], candidates[1::2], strict=True)
    candidates = [jnp.where(odd, b, a) for a, b in pairs]
    bit += 1
  return candidates[0]


def _each(levels: jax.Array | np.ndarray, n: int) -> jax.Array:
  """Level n, in a shape that goes with [B, K, T, D]."""
  level = jnp.asarray(levels[..., n], jnp.float32)
  return level[None, :, None, None] if level.ndim else level.reshape(1, 1, 1, 1)
