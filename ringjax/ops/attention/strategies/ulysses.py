"""Ulysses: shards exchange tokens for heads, attend alone, and exchange back.

Guarantees: equals `reference` on the gathered sequence.
Cost: four all-to-alls of one shard's size forward (q, k, v, out); backward the
transposes of these.
Memory: one shard's size, as before; heads / R of them over all tokens.
Ref: Jacobs et al. 2023 (DeepSpeed-Ulysses), arXiv 2309.14509.

The query heads of one kv head are split into `split` parts so that there are at
least as many (kv head, part) units as shards; units are padded to a multiple
of R. With K a multiple of R nothing is repeated or padded; with fewer kv heads
than shards each shard is sent just the kv heads that its queries need.

The local algorithm may be a strategy: `Ulysses(Ring())` exchanges within groups
of neighbours, each of which then is one shard of a ring that serves its heads
alone (Fang and Zhao 2024, arXiv 2405.07719: USP). That serves more devices
than heads, with fewer and larger hops than a ring of all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import Local, pad_axis
from ringjax.ops.attention.scores import Context, Scores, Terms
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.parallel.collectives import Axis


@dataclasses.dataclass(frozen=True)
class Ulysses(Strategy):
  """All-to-all over heads around a local algorithm.

  Attributes:
    local: `Blockwise()`, `Dense()`, or a strategy between groups of shards.
    axis: Mesh axis; filled in by the functions that take `axis=`.
    inner: Number of neighbours that exchange heads, if `local` is such a
      strategy on the same mesh axis.
  """

  inside = ("Ring", "RingQ", "Chain", "Gather", "Halo")

  inner: int | None = None

  def attend(
    self, scores: Scores, x: Local, terms: Terms, context: Context
  ) -> tuple[Float[Array, "B K G T J"], Float[Array, "B K G T"]]:
    nested = hasattr(self.local, "attend")
    shard_strategy = self.local if nested else Gather(self.local)
    if self.axis is None:
      return shard_strategy.attend(scores, x, terms, context)
    x, terms, context, to_tokens = heads_for_tokens(
      self.axis, self.axes, x, terms, context
    )
    out, lse = shard_strategy.attend(scores, x, terms, context)
    return to_tokens(out), to_tokens(lse[..., None])[..., 0]


def heads_for_tokens(
  axis: Axis, axes: tuple[str, ...], x: Local, terms: Terms, context: Context
) -> tuple[Local, Terms, Context, Callable[[Array], Array]]:
  """Exchange the heads of some tokens for all tokens of some heads.

  Args:
    axis: Manual axis that shards the tokens.
    axes: Manual axes over which results vary.
    x: Operands of this shard's tokens.
    terms: Arrays of the score function.
    context: Coordinates and masks.

  Returns:
    (x, terms, context) of all tokens and this shard's heads, and a function
    that brings a result [B, K, G, T, ...] of these back to the shard's tokens.
  """
  varying = collectives.varying_axes(x, terms, context) | {*axes}
  x, terms, context = collectives.vary((x, terms, context), varying)
  _, kv_heads, group, *_ = x.q.shape
  units = _Units(kv_heads, group, collectives.axis_size(axis))
  to_heads = lambda a: collectives.exchange(a, axis, 1, 3)
  traded = Local(
    to_heads(units.of_queries(x.q)),
    collectives.exchange(units.of_keys(x.k), axis, 1, 2),
    collectives.exchange(units.of_keys(x.v), axis, 1, 2),
  )
  of_shard = lambda a: units.of_shard(a, axis)
  all_coords = lambda at: Coords(*collectives.gather(tuple(at), axis, 1))
  return (
    traded,
    Terms(
      _pair_to_heads(terms.bias, units, axis),
      of_shard(terms.slopes),
      of_shard(terms.sinks),
    ),
    context._replace(
      q=all_coords(context.q),
      k=all_coords(context.k),
      allow=_pair_to_heads(context.allow, units, axis),
      heads=of_shard(context.heads),
    ),
    lambda a: units.to_queries(collectives.exchange(a, axis, 3, 1)),
  )


class _Units:
  """Split of K kv heads with G query heads each into a multiple of R units."""

  def __init__(self, kv_heads: int, group: int, size: int):
    self.kv_heads, self.group, self.size = kv_heads, group, size
    self.split = -(-size // kv_heads)
    self.part = -(-group // self.split)
    self.units = -(-kv_heads * self.split // size) * size

  def of_queries(self, x: jax.Array) -> jax.Array:
    """Reshape [B, K, G, ...] to [B, units, part, ...]."""
    x = pad_axis(x, 2, self.split * self.part)
    x = x.reshape(
      x.shape[0], self.kv_heads * self.split, self.part, *x.shape[3:]
    )
    return pad_axis(x, 1, self.units)

  def to_queries(self, x: jax.Array) -> jax.Array:
    """Reshape [B, units, part, ...] to [B, K, G, ...]."""
    x = x[:, : self.kv_heads * self.split]
    x = x.reshape(
      x.shape[0], self.kv_heads, self.split * self.part, *x.shape[3:]
    )
    return x[:, :, : self.group]

  def of_keys(self, x: jax.Array) -> jax.Array:
    """Repeat [B, K, ...] to [B, units, ...]."""
    if self.split > 1:
      x = jnp.repeat(x, self.split, axis=1)
    return pad_axis(x, 1, self.units)

  def of_shard(self, x: jax.Array | None, axis: Axis) -> jax.Array | None:
    """Slice this shard's [units / R, part] of [K, G]."""
    if x is None:
      return None
    x = self.of_queries(x[None])[0]
    shard_units = self.units // self.size
    return jax.lax.dynamic_slice_in_dim(
      x, collectives.axis_index(axis) * shard_units, shard_units, 0
    )


def _pair_to_heads(
  pair: jax.Array | None, units: _Units, axis: Axis
) -> jax.Array | None:
  """Exchange [B|1, K|1, G|1, T|1, S|1]: local rows to this shard's heads."""
  if pair is None:
    return None
  if pair.shape[1] == 1 and pair.shape[2] == 1:
    if pair.shape[3] == 1:
      return pair
    return collectives.gather(pair, axis, 3)
  full = (units.kv_heads, units.group)
  pair = jnp.broadcast_to(pair, (pair.shape[0], *full, *pair.shape[3:]))
  pair = units.of_queries(pair)
  if pair.shape[3] != 1:
    return collectives.exchange(pair, axis, 1, 3)
  shard_units = units.units // units.size
  return jax.lax.dynamic_slice_in_dim(
    pair, collectives.axis_index(axis) * shard_units, shard_units, 1
  )
