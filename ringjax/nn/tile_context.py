"""Sharding contexts in which prompts read the tiles that a pattern chooses.

`TileParallel` reads a whole prompt, `CachedTiles` a chunk of one against the
cache. Both record what they leave out where the call's tokens ask for it.
"""

from __future__ import annotations

import copy
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.kv.base import LayerCache
from ringjax.nn.sharding_context import (
  CachedAttention,
  ContextParallel,
  Extras,
)
from ringjax.nn.sums.tile_sums import TileOwners, TileRecord
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.tiles.chosen_tiles import ChosenTiles
from ringjax.ops.attention.tiles.tile_pattern import TilePattern
from ringjax.ops.attention.tiles.tile_shards import tile_owners
from ringjax.ops.attention.tiles.tiles_api import tile_attention
from ringjax.ops.mask import Mask
from ringjax.parallel.layout import Contiguous

# Queries of a row whose attention is computed in full. Those of a chunk are few
# enough to read a cache's tiles in place.
_SAMPLES, _CHUNK_SAMPLES = 32, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileParallel(ContextParallel):
  """Queries of a whole prompt read the tiles that a pattern chooses.

  Layers without positions, as of `across` and `between`, read all keys.

  Attributes:
    pattern: Choice of the tiles.
    tile_strategy: Strategy of `tile_attention` on a sharded sequence; None:
      that of the layout.
  """

  pattern: TilePattern
  tile_strategy: str | None = None

  takes_rows = False
  takes_classes = False

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B T N J"]:
    assert cache.fresh is not None
    assert extras.selection is None and extras.slopes is None
    k, v = (jnp.swapaxes(x, 1, 2) for x in cache.fresh[:2])
    seg = tokens.seg if tokens.segmented else None
    options = self.call_options(q, k.shape[2], tokens, mask, extras)
    options.update(
      kv_positions=tokens.pos, kv_segment_ids=seg, return_residual=True
    )
    out, lse, tiles = tile_attention(
      q,
      k,
      v,
      self.pattern,
      q_positions=tokens.pos,
      q_segment_ids=seg,
      return_tiles=True,
      strategy=self.tile_strategy,
      **options,
    )
    record = tokens.record_of(TileRecord)
    if record is None:
      return out
    columns = self._columns(q.shape[1])
    at, sampled = _sampled(tokens, q.shape[0], _SAMPLES, columns)
    pos, seg_at = (jnp.take_along_axis(x, at, 1) for x in tokens.at)
    # Sampled queries travel, not keys; both have explicit positions.
    options["layout"] = Contiguous()
    _, all_lse = dot_product_attention(
      jnp.take_along_axis(q, at[:, :, None, None], 1),
      k,
      v,
      q_positions=pos,
      q_segment_ids=None if seg is None else seg_at,
      strategy="ring_q",
      **options,
    )
    chosen_lse = jnp.take_along_axis(lse, at[:, :, None], 1)
    record.add(
      chosen_lse, all_lse, sampled, tuple(tiles), self._owners(q.shape[1])
    )
    return out

  def _columns(self, width: int) -> Int[Array, " T"]:
    """Column of each of the call's tokens in the sequence's order."""
    number = jnp.arange(width, dtype=jnp.int32)
    if self.size == 1 or isinstance(self.layout, Contiguous):
      return number
    order = self.layout.all_positions(width, self.size)
    return jnp.zeros_like(number).at[order].set(number)

  def _owners(self, width: int) -> TileOwners | None:
    """Shard that computes each column's block; None where heads are sharded."""
    if self.size == 1 or self.tile_strategy == "ulysses":
      return None
    block = self.pattern.block
    local_length = self.layout.local_length(width, self.size)
    owners = tile_owners(self.layout, self.size, local_length, block)
    order = self.layout.all_positions(width, self.size)
    first = order % block == 0
    return TileOwners(jnp.asarray(owners)[order // block], first, self.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedTiles(CachedAttention):
  """Queries of a chunk read tiles of the cache that a pattern chooses.

  Tiles are chosen among the keys of a segment of the cache, of at most 8,192
  tokens: at least the pattern's part of each segment's attention is read.

  Attributes:
    pattern: Choice of the tiles.
  """

  pattern: TilePattern
  replicated: bool = False

  takes_classes = False
  # A row's last chunk may stand beside longer ones, and reads as it does there.
  few = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, "local", ChosenTiles(self.pattern))

  def __call__(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B T N J"]:
    record = tokens.record_of(TileRecord)
    if record is None:
      return super().__call__(q, tokens, cache, mask, extras)
    extras = dataclasses.replace(extras, residual=True)
    out, lse = super().__call__(q, tokens, cache, mask, extras)
    columns = jnp.arange(q.shape[1], dtype=jnp.int32)
    at, sampled = _sampled(tokens, q.shape[0], _CHUNK_SAMPLES, columns)
    samples = copy.copy(tokens)
    samples.pos, samples.seg = (
      jnp.take_along_axis(x, at, 1) for x in tokens.at
    )
    dense = CachedAttention(
      mesh=self.mesh,
      axis=self.axis,
      segments=self.segments,
      replicated=False,
      local=AutoKernel(),
    )
    q = jnp.take_along_axis(q, at[:, :, None, None], 1)
    _, all_lse = dense(q, samples, cache, mask, extras)
    chosen_lse = jnp.take_along_axis(lse, at[:, :, None], 1)
    record.add(chosen_lse, all_lse, sampled)
    return out


def _sampled(
  tokens: Tokens, batch: int, count: int, columns: Int[Array, " T"]
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
  """Columns of queries at even distances in each row, and whether each is real.

  Args:
    tokens: Tokens of a call. In the sequence's order a row's tokens are first,
      its padding after them.
    batch: Number of rows.
    count: Number of queries of a row.
    columns: Column of each token in the sequence's order.
  """
  real = jnp.broadcast_to(tokens.seg != 0, (batch, tokens.seg.shape[1]))
  length = jnp.sum(real, 1, dtype=jnp.int32)[:, None]
  odd = 2 * jnp.arange(count, dtype=jnp.int32)[None] + 1
  at = odd * length // (2 * count)
  at = columns[jnp.clip(at, 0, jnp.maximum(length - 1, 0))]
  return at, jnp.take_along_axis(real, at, 1)
