"""Native sparse attention (NSA) over the keys of a cache.

Guarantees: queries attend to what `native_sparse_attention` reads where keys
travel: compressed keys, the blocks that these weigh most, and a window. A
compressed key is a learned weighted sum of the keys of its window, and so is
its value. Windows and blocks are of positions, so the choice does not depend on
views, shards or chunks of queries, but for blocks whose scores differ by less
than the rounding of their sums.
Cost: the compressed keys and values that a cache keeps are read, or else all
keys and values for them; a few queries then read their blocks and the window
alone, see `block_reading`. On shards the scores of all compressed keys are
sent.
Memory: compressed keys and values of the shard's windows, float32, or of all of
them where a cache keeps none, and that of `block_reading`.

Ref: Yuan et al. 2025, Native Sparse Attention, arXiv 2502.11089.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.ops.attention.blockwise import cut_coords, product
from ringjax.ops.attention.cached.block_reading import read_blocks
from ringjax.ops.attention.cached.cached_choice import PositionChoice
from ringjax.ops.attention.cached.selection import by_chunks
from ringjax.ops.attention.cached.summaries.summary_view import (
  ShardSummaries,
  SummaryView,
)
from ringjax.ops.attention.cached.views import (
  KVView,
  fold_tiles,
  tile_slots,
  tiled,
)
from ringjax.ops.attention.sparse.given import GivenBlocks
from ringjax.ops.attention.sparse.native_blocks import NativeBlocks
from ringjax.ops.attention.sparse.native_sparse import (
  NativeSparse,
  native_sparse_attention,
)
from ringjax.ops.attention.sparse.strided_blocks import strided_blocks
from ringjax.ops.mask import Causal, Coords, SameSegment, Window, visible
from ringjax.ops.softmax import Partial, finite_max, wide_dtype
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import AUTO, MeshAxes
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit

# Most pairs of queries and keys of all heads that are marked at once.
_PAIRS = 1 << 24
_LAST = 2**31 - 1
# Branches: compressed keys, chosen blocks, window.
BRANCHES = 3


class PoolingWeights(NamedTuple):
  """Weights by which the keys of a window become its compressed key.

  Fields:
    keys: Weight of each number of a key by its place in the window, [n, K, H].
    values: Weights of the values, [n, K, J].
  """

  keys: Float[Array, "n K H"]
  values: Float[Array, "n K J"]

  def specs(self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes) -> Any:
    """Return the same tree of PartitionSpecs: every device has all weights."""
    del batch, heads, tokens
    replicated: Any = P()
    return PoolingWeights(replicated, replicated)

  def of_heads(self, visit: CacheVisit) -> PoolingWeights:
    """Weights of the kv heads of a visit's device."""
    total, local = self.keys.shape[1], visit.q.shape[1]
    if local == total:
      return self
    first = collectives.axis_index(visit.head_axes) * local
    take = lambda x: lax.dynamic_slice_in_dim(x, first, local, 1)
    return PoolingWeights(*map(take, self))


class CompressedKeys(NamedTuple):
  """Compressed keys that a shard reads, and the coordinates of all.

  Fields:
    of_shard: Keys and values that the shard reads, by number of the window.
    first: Number of the window of the first compressed key.
    at: Coordinates of the last token of each window, [B, C]; segment 0 where
      its tokens are of several documents, or of none.
  """

  of_shard: ShardSummaries
  first: int
  at: Coords


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeReading(PositionChoice):
  """Native sparse attention of the queries of a call; a pytree.

  Attributes:
    config: Sizes of blocks and of the window.
    gates: Weights of the three branches, [B, T, N, 3], where keys travel; else
      None.
    weights: Weights of compressed keys; None in a visit, which gets them by
      `visited`.
    summaries: Compressed keys of whole windows, or None, and in a visit.
  """

  config: NativeSparse
  gates: Float[Array, "B T N 3"] | None = None
  weights: PoolingWeights | None = None
  summaries: SummaryView | None = None

  def visited(self) -> tuple[Any, ...]:
    if self.summaries is not None:
      return (self.summaries,)
    return () if self.weights is None else (self.weights,)

  def specs(self, batch: MeshAxes, tokens: MeshAxes) -> NativeReading:
    """Return the same tree of PartitionSpecs: a visit has no arrays."""
    del batch, tokens
    return self

  def without_keys(self) -> NativeReading:
    """Return the sizes alone."""
    return NativeReading(config=self.config)

  def chooses(self, tokens: int) -> bool:
    """True: its three branches are not attention to all keys."""
    del tokens
    return True

  def queries(
    self, q: Float[Array, "B T N H"], kv_heads: int
  ) -> Float[Array, "B T _ H"]:
    """The queries of each kv head, once for each branch."""
    b, t, _, h = q.shape
    grouped = q.reshape(b, t, kv_heads, 1, -1, h)
    return jnp.tile(grouped, (1, 1, 1, BRANCHES, 1, 1)).reshape(b, t, -1, h)

  def output(
    self, out: Float[Array, "B T _ J"], kv_heads: int
  ) -> Float[Array, "B T N J"]:
    """Sum of the branches, weighted by their gates."""
    assert self.gates is not None
    b, t, _, dim = out.shape
    branches = out.reshape(b, t, kv_heads, BRANCHES, -1, dim)
    gates = self.gates.reshape(b, t, kv_heads, -1, BRANCHES)
    gates = jnp.swapaxes(gates, 3, 4)[..., None].astype(out.dtype)
    return jnp.sum(branches * gates, 3).reshape(b, t, -1, dim)

  def over_shards(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    segments: Int[Array, "#B T"] | None,
    **options: Any,
  ) -> tuple[Float[Array, "B T N J"], Float[Array, "B T N"], GivenBlocks]:
    assert self.gates is not None and self.weights is not None
    mask = options.pop("mask")
    if mask not in (Causal(), Causal() & SameSegment()):
      raise OptionError(
        "segments",
        f"{mask} for layers of native sparse attention",
        "SameSegment(): a compressed key is of one document",
        "leave segments out",
      )
    for name in ("logits_soft_cap", "sinks"):
      assert options.pop(name) is None, name
    mesh, axis, layout = (options[x] for x in ("mesh", "axis", "layout"))
    cut = functools.partial(
      strided_blocks,
      length=self.config.length,
      stride=self.config.stride,
      mesh=mesh,
      axis=None if axis == AUTO else axis,
      layout=layout,
    )

    def compressed(x: jax.Array, weights: jax.Array) -> jax.Array:
      weights = weights.astype(wide_dtype(x.dtype))
      return jnp.einsum("bcnkh,nkh->bckh", cut(x), weights).astype(x.dtype)

    return native_sparse_attention(
      q,
      k,
      v,
      compressed(k, self.weights.keys),
      compressed(v, self.weights.values),
      self.gates,
      self.config,
      segment_ids=segments,
      return_residual=True,
      return_selection=True,
      **options,
    )

  def partial(self, visit: CacheVisit, views: Sequence[KVView]) -> Partial:
    """Partials of the branches, along the groups of query heads.

    The visit's queries are those of each branch, [B, K, 3 G, T, H].
    """
    if any(view.mask is not None for view in views):
      raise OptionError(
        "cache",
        "keys with a mask of their own, for layers of native sparse attention",
        "keys of one text",
        "read the contexts as one prompt",
      )
    (source,) = visit.index_views
    kv_heads = (
      source.heads if isinstance(source, SummaryView) else source.keys.shape[1]
    )
    sharded_groups = bool(visit.head_axes) and kv_heads == 1
    rows = visit.q.shape[2]
    if sharded_groups:
      # The query heads of the only kv head choose together.
      q = collectives.gather(visit.q, visit.head_axes, 2)
      visit = dataclasses.replace(visit, q=q)
    at = self._ends(views, visit)
    if isinstance(source, SummaryView):
      sizes = source.sizes
      compressed = CompressedKeys(
        source.of_shard(visit.axis), sizes.incomplete, at
      )
    else:
      all_keys = self._compressed(views, source.of_heads(visit), visit)
      compressed = CompressedKeys(all_keys, 0, at)
    b, heads, groups, t, _ = visit.q.shape
    groups //= BRANCHES
    of_branch = lambda n: visit.q[:, :, n * groups : (n + 1) * groups]
    near_mask = visit.mask & Window(self.config.window)
    window_partial = dataclasses.replace(
      visit, q=of_branch(2), mask=near_mask, selection=None, index_views=()
    ).on_shard(views)
    slots = sum(view.shape[2] for view in views)
    shards = 1 if visit.axis is None else collectives.axis_size(visit.axis)
    blocks = -(-slots * shards // self.config.block)
    broadcast = lambda x: jnp.broadcast_to(x, (b, t))
    queries = visit.q[:, :, : 2 * groups]
    operands = jnp.moveaxis(queries, 3, 1), Coords(*map(broadcast, visit.at))

    def read_chunk(chunk: PyTree) -> tuple[Partial, Partial]:
      q, q_at = chunk
      compressed_partial, best = self._by_compressed(
        q[:, :, :, :groups], Coords(*q_at), compressed, visit, blocks
      )
      q = jnp.moveaxis(q[:, :, :, groups:], 1, 3)
      block_partial = read_blocks(
        views, q, Coords(*q_at), best, self.config.block, blocks, visit
      )
      by_token = lambda x: jnp.moveaxis(x, 3, 1)
      return jax.tree.map(by_token, (compressed_partial, block_partial))

    parts = -(-b * heads * groups * t * slots // _PAIRS)
    by_head = lambda x: jnp.moveaxis(x, 1, 3)
    partials = by_chunks(read_chunk, operands, parts)
    compressed_partial, block_partial = jax.tree.map(by_head, partials)
    join = lambda *x: jnp.concatenate(x, 2)
    partial = jax.tree.map(
      join, compressed_partial, block_partial, window_partial
    )
    if sharded_groups:
      first = collectives.axis_index(visit.head_axes) * rows
      take = lambda x: lax.dynamic_slice_in_dim(x, first, rows, 2)
      partial = jax.tree.map(take, partial)
    return partial

  def _count(self, views: Sequence[KVView], visit: CacheVisit) -> int:
    """Number of windows of compressed keys of all shards."""
    shards = 1 if visit.axis is None else collectives.axis_size(visit.axis)
    slots = sum(view.shape[2] for view in views) * shards
    return -(-slots // self.config.stride)

  def _ends(self, views: Sequence[KVView], visit: CacheVisit) -> Coords:
    """Coordinates of the last tokens of the windows of compressed keys."""
    b, count = visit.q.shape[0], self._count(views, visit)
    length, stride = self.config.length, self.config.stride
    like = visit.q, tuple(views)
    first = collectives.full((b, count), -_LAST, jnp.int32, like)
    last = collectives.full((b, count), 0, jnp.int32, like)
    for view in views:
      at = Coords(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in view.at))
      for first_place in range(0, length, stride):
        number, _ = self._window(*at, first_place, count)
        first = jax.vmap(_largest)(first, number, -at.seg)
        last = jax.vmap(_largest)(last, number, at.seg)
    if visit.axis is not None:
      first, last = (collectives.largest(x, visit.axis) for x in (first, last))
    end = jnp.arange(count, dtype=jnp.int32)[None] * stride + length - 1
    segment = jnp.where(-first == last, last, 0)
    return Coords(jnp.broadcast_to(end, segment.shape), segment)

  def _compressed(
    self, views: Sequence[KVView], weights: PoolingWeights, visit: CacheVisit
  ) -> ShardSummaries:
    """Compressed keys and values of all shards, of which all keys are read.

    Each shard reads a part of them.
    """
    b, heads, _, _, dims = visit.q.shape
    length, stride = self.config.length, self.config.stride
    count = self._count(views, visit)
    dtype = wide_dtype(visit.q.dtype)
    weights = PoolingWeights(*(x.astype(dtype) for x in weights))
    like = visit.q, tuple(views), weights
    zeros = lambda n: collectives.zeros((b, count, heads, n), dtype, like)
    sums = zeros(dims), zeros(weights.values.shape[2])
    offsets = range(0, length, stride)
    for view in views:
      size = tile_slots(view, visit.platform)
      at = tiled(view.at, size)
      at = Coords(*(jnp.broadcast_to(x, (b, x.shape[1])) for x in at))

      def add(
        start: Index,
        k: Array,
        v: Array,
        sums: tuple[Array, Array],
        at: Coords = at,
        size: int = size,
      ) -> tuple[Array, Array]:
        pos, seg = cut_coords(at, start, size)
        of_keys, of_values = sums
        for first_place in offsets:
          number, place = self._window(pos, seg, first_place, count)
          added = jax.vmap(_added)
          of_keys = added(of_keys, number, weights.keys[place], k)
          of_values = added(of_values, number, weights.values[place], v)
        return of_keys, of_values

      tiles = jnp.arange(at.pos.shape[1] // size, dtype=jnp.int32)
      num_tiles = jnp.asarray(tiles.size, jnp.int32)
      sums = fold_tiles(view, size, tiles, num_tiles, add, sums)
    number = jnp.arange(count, dtype=jnp.int32)
    stored = number >= 0
    if visit.axis is not None:
      sums = collectives.total(sums, visit.axis)
      shards = collectives.axis_size(visit.axis)
      stored = number % shards == collectives.axis_index(visit.axis)
    return ShardSummaries(*sums, number, stored)

  def _window(
    self,
    pos: Int[Array, "B S"],
    seg: Int[Array, "B S"],
    first_place: int,
    count: int,
  ) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Number of a window of each token, `count` for none, and its place there.

    That is the window in which its place is `first_place` or one of the next
    `stride` ones.
    """
    stride = self.config.stride
    number = pos // stride - first_place // stride
    number = jnp.where((seg != 0) & (number >= 0), number, count)
    return number, pos % stride + first_place

  def _by_compressed(
    self,
    q: Float[Array, "B t K G H"],
    q_at: Coords,
    compressed: CompressedKeys,
    visit: CacheVisit,
    blocks: int,
  ) -> tuple[Partial, Array]:
    """Partial of this shard's compressed keys, and the blocks that are read.

    Args:
      q: Queries.
      q_at: Coordinates of the queries.
      compressed: Compressed keys of all shards.
      visit: Call to which the queries belong.
      blocks: Number of blocks of all keys of the layer.

    Returns:
      The partial, and the blocks that queries read, int32 [B, K, 1, t, n].
    """
    of_shard, first, at = compressed
    keys, axis = of_shard.keys, visit.axis
    dtype, count = keys.dtype, at.pos.shape[1]
    s = product("btkgh,bckh->bkgtc", q.astype(dtype), keys)
    s = s * visit.scores.scale
    expand = lambda at, axis: Coords(*(jnp.expand_dims(x, axis) for x in at))
    seen = visible(visit.mask, expand(q_at, 2), expand(at, 1))
    place = of_shard.number - first
    inside = of_shard.stored & (place >= 0) & (place < count)
    local_seen = seen[..., jnp.clip(place, 0, count - 1)] & inside[None, None]
    s = jnp.where(local_seen[:, None, None], s, -jnp.inf)
    all_s = of_shard.everywhere(s, first, count, axis)
    m = jnp.max(all_s, -1)
    finite_m = finite_max(m)[..., None]
    all_p = jnp.exp(all_s - finite_m)
    total = jnp.sum(all_p, -1)
    by_query = jnp.sum(all_p / jnp.where(total == 0, 1, total)[..., None], 2)
    # Each shard adds its own to the sum over shards.
    p = jnp.exp(s - finite_m)
    acc = product("bkgtc,bckj->bkgtj", p, of_shard.values)
    # The choice is by probabilities, of the keys of all shards.
    choice = NativeBlocks(
      keys=keys[:, :0],
      segments=at.seg[:, :0],
      length=self.config.length,
      stride=self.config.stride,
      block=self.config.block,
      count=min(self.config.count, blocks),
      initial=self.config.initial,
      local=self.config.local,
      scale=visit.scores.scale,
    )
    best = choice.best(jnp.swapaxes(by_query, 1, 2), q_at, blocks)
    best = jnp.swapaxes(best, 1, 2)[:, :, None]
    return Partial(acc, m, jnp.sum(p, -1)), best


tree.register(NativeReading, ("gates", "weights", "summaries"), ("config",))


def _added(
  total: Float[Array, "C K X"],
  number: Int[Array, " n"],
  weight: Float[Array, "n K X"],
  x: Float[Array, "K n X"],
) -> Float[Array, "C K X"]:
  """Sums of windows with weighted keys or values of tokens added."""
  weighted = jnp.swapaxes(x, 0, 1).astype(total.dtype) * weight
  return total.at[number].add(weighted, mode="drop")


def _largest(values: jax.Array, number: jax.Array, new: jax.Array) -> jax.Array:
  """Largest value [C] of each window, with those of tokens."""
  return values.at[number].max(new, mode="drop")
