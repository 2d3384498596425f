"""Sums of what one layer of attention records of the keys that it reads.

A prompt's layer records tiles, that of an answer pages of host memory.

The part of the attention that is left out is measured at sampled queries: with
the log-sum-exp over the chosen tiles and over all keys it is
1 - exp(chosen - all).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.nn.sums.sum_record import SumRecord


class TileSums(NamedTuple):
  """Sums over the tokens of a call in one layer, float32.

  With a leading axis they are those of several layers.

  Fields:
    chosen: Tiles that are computed, summed over queries and heads.
    visible: Tiles that dense attention computes, likewise; 0 where tiles are
      not counted.
    left_out: Part of the attention that is left out, summed over the sampled
      queries of each head, [N].
    samples: Number of sampled queries.
    by_shard: Tiles that each shard computes, summed over its blocks of queries
      and heads, [R]; no numbers where the queries are not sharded.
  """

  chosen: Float[Array, "*L"]
  visible: Float[Array, "*L"]
  left_out: Float[Array, "*L N"]
  samples: Float[Array, "*L"]
  by_shard: Float[Array, "*L R"]


class TileOwners(NamedTuple):
  """Shards that compute a call's blocks of queries.

  Fields:
    shard: Shard of each token's block, int32 [T].
    first: Whether each token is the first of its block, bool [T].
    shards: Number of shards.
  """

  shard: Int[Array, " T"]
  first: Bool[Array, " T"]
  shards: int


class TileRecord(SumRecord[TileSums]):
  """Receives the tiles of one layer while it is traced."""

  def add(
    self,
    chosen_lse: Float[Array, "B M N"],
    all_lse: Float[Array, "B M N"],
    sampled: Bool[Array, "B M"],
    tiles: tuple[Int[Array, "B T N"], Int[Array, "B T N"]] | None = None,
    owners: TileOwners | None = None,
  ) -> None:
    """Add an attention's sampled queries, and the tiles of all its queries.

    Args:
      chosen_lse: Log-sum-exp of the sampled queries over the chosen tiles.
      all_lse: Log-sum-exp of the same queries over all keys.
      sampled: Whether each sampled query is no padding.
      tiles: Numbers of tiles that are computed, and that dense attention
        computes, of the block of each query; None if they are not counted.
      owners: Shards that compute the blocks; None where queries are not
        sharded.
    """
    real = sampled[..., None] & (all_lse > -jnp.inf)
    left_out = -jnp.expm1(jnp.where(real, chosen_lse - all_lse, 0))
    # Both sums round: a part below 0 is none.
    left_out = jnp.sum(jnp.maximum(left_out, 0), (0, 1))
    zero = jnp.zeros((), jnp.float32)
    chosen = visible = zero
    if tiles is not None:
      count = lambda x: jnp.sum(
        jnp.where(self.real[..., None], x, 0).astype(jnp.float32)
      )
      chosen, visible = map(count, tiles)
    by_shard = jnp.zeros((0,), jnp.float32)
    if tiles is not None and owners is not None:
      counted = (self.real & owners.first[None])[..., None]
      by_token = jnp.sum(jnp.where(counted, tiles[0], 0), (0, 2))
      shard = jnp.arange(owners.shards)[:, None]
      by_shard = jnp.sum(
        jnp.where(owners.shard[None] == shard, by_token[None], 0), 1
      ).astype(jnp.float32)
    sums = TileSums(
      chosen,
      visible,
      left_out.astype(jnp.float32),
      jnp.sum(real[..., 0], dtype=jnp.float32),
      by_shard,
    )
    self._add(sums)


class PageSums(NamedTuple):
  """Sums over the queries of a call in one layer, float32.

  With a leading axis they are those of several layers.

  Fields:
    left_out: Part of the attention that is left out, summed over the queries of
      each head, [N].
    top_read: Part of the keys with the largest products that is read, likewise.
    error: Norm of the error of the output, divided by that of the output over
      all keys, likewise.
    queries: Number of queries.
  """

  left_out: Float[Array, "*L N"]
  top_read: Float[Array, "*L N"]
  error: Float[Array, "*L N"]
  queries: Float[Array, "*L"]


class PageRecord(SumRecord[PageSums]):
  """Receives what one layer reads of pages in host memory."""

  def add(
    self,
    read_lse: Float[Array, "B T N"],
    all_lse: Float[Array, "B T N"],
    top_read: Float[Array, "B T N"],
    error: Float[Array, "B T N"],
  ) -> None:
    """Add an attention's queries to the layer's.

    Args:
      read_lse: Log-sum-exp of the queries over the keys that are read.
      all_lse: Log-sum-exp of the same queries over all keys.
      top_read: Part of each query's best keys that is read.
      error: Error of the output, as a part of the output over all keys.
    """
    real = self.real[..., None] & (all_lse > -jnp.inf)
    left_out = -jnp.expm1(jnp.where(real, read_lse - all_lse, 0))
    total = lambda x: jnp.sum(jnp.where(real, x, 0), (0, 1), dtype=jnp.float32)
    sums = PageSums(
      # Both sums round: a part below 0 is none.
      total(jnp.maximum(left_out, 0)),
      total(top_read),
      total(error),
      jnp.sum(real[..., 0], dtype=jnp.float32),
    )
    self._add(sums)
