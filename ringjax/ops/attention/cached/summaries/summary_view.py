"""View of the summaries of one layer, by the numbers of their windows."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.ops.attention.cached.summaries.window_sums import (
  WindowSizes,
)
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import ArrayLeaf, Index


class ShardSummaries(NamedTuple):
  """Summaries that a shard reads.

  Fields:
    keys: Sums of keys, [B, n, K, H]; of any numbers where a window has not
      ended.
    values: Sums of values, [B, n, K, J]; of size 0 without values.
    number: Number of the window of each, int32 [n].
    stored: Whether the shard stores it, bool [n].
  """

  keys: Float[Array, "B n K H"]
  values: Float[Array, "B n K J"]
  number: Int[Array, " n"]
  stored: Bool[Array, " n"]

  def everywhere(
    self,
    x: Float[Array, "*b n"],
    first: int,
    count: int,
    axis: str | None,
  ) -> Float[Array, "*b c"]:
    """Numbers of windows, of those of each shard's summaries.

    Args:
      x: A number for each summary of the shard.
      first: First window of the result.
      count: Number of windows of the result; -inf for those without a summary.
      axis: Manual axis that shards the summaries, or None.
    """
    if axis is None:
      # All of them, in order.
      x = x[..., first : first + count]
      missing = [(0, 0)] * (x.ndim - 1) + [(0, count - x.shape[-1])]
      return jnp.pad(x, missing, constant_values=-jnp.inf)
    like = x, self.number
    full = collectives.full((*x.shape[:-1], count), -jnp.inf, x.dtype, like)
    place = self.number - first
    place = jnp.where(self.stored & (place >= 0), place, count)
    return collectives.largest(full.at[..., place].set(x, mode="drop"), axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryView:
  """Summaries of one layer of a stack, in slots of rows or pages of a pool.

  Attributes:
    k: Sums of keys, [L, B, K, C, H], or [L, N, K, E, H] of the windows that end
      in each of N pages.
    v: Sums of values in the same layout; of size 0 without values.
    layer: Index of the layer in the L, int32 [].
    table: Pages of each row, int32 [B, pages]; None for slots of rows.
    page: Number of tokens of a page; 0 for slots of rows.
    heads: Number of KV heads of all devices.
    sizes: Sizes of the windows.
    of_kv_heads: Whether its heads are sharded as those of keys; those of an
      index are not.
  """

  k: Float[ArrayLeaf, "L _ K _ H"]
  v: Float[ArrayLeaf, "L _ K _ J"]
  layer: Index
  table: Int[Array, "B pages"] | None = None
  page: int = 0
  heads: int
  sizes: WindowSizes
  of_kv_heads: bool = True

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> SummaryView:
    """Return the same tree of PartitionSpecs for these mesh axes."""
    if self.table is None:
      arrays = P(None, batch, heads, tokens)
    else:
      arrays = P(None, tokens, heads)
    return tree.with_leaves(
      self,
      k=arrays,
      v=arrays if self.v.size else P(),
      layer=P(),
      table=None if self.table is None else P(batch, tokens),
    )

  def of_shard(self, axis: str | None) -> ShardSummaries:
    """Summaries that this shard reads; `axis` is the manual axis, or None."""
    shard, shards = jnp.int32(0), 1
    if axis is not None:
      shard = collectives.axis_index(axis)
      shards = collectives.axis_size(axis)
    if self.table is None:
      count = self.k.shape[3]
      number = jnp.arange(count, dtype=jnp.int32) + shard * count
      of_layer: Any = lambda x: lax.dynamic_index_in_dim(
        x, jnp.asarray(self.layer, jnp.int32), 0, keepdims=False
      )
      keys, values = (jnp.swapaxes(of_layer(x), 1, 2) for x in (self.k, self.v))
      return ShardSummaries(keys, values, number, jnp.ones((count,), bool))
    slots = self.table.shape[1] * self.page * shards
    number = jnp.arange(slots // self.sizes.stride, dtype=jnp.int32)
    page, entry = page_entry(number, self.page, self.sizes)
    local = jnp.clip(page // shards, 0, self.table.shape[1] - 1)
    index = jnp.maximum(self.table[:, local], 0)
    layer = jnp.asarray(self.layer, jnp.int32)
    read = lambda x: x[layer, index, :, entry[None]]
    values = read(self.v) if self.v.size else read(self.k)[..., :0]
    return ShardSummaries(read(self.k), values, number, page % shards == shard)


tree.register(
  SummaryView,
  ("k", "v", "layer", "table"),
  ("page", "heads", "sizes", "of_kv_heads"),
)


def page_entry(
  number: Int[Array, " ..."], page: int, sizes: WindowSizes
) -> tuple[Int[Array, " ..."], Int[Array, " ..."]]:
  """Page of a row in which a window ends, and its place among those of a page.

  Args:
    number: Numbers of windows.
    page: Number of tokens of a page.
    sizes: Sizes of the windows.
  """
  last = (number + 1) * sizes.stride - 1
  return last // page, last % page // sizes.stride
