"""Attention of blocks of queries over the tiles that a pattern chooses.

Guarantees: the result is that of dense attention under the mask that the choice
stands for; no array is T x S.
Cost: the products of the chosen tiles. Blocks of queries with lists of about
the same length are computed together, as many tiles as the longest list has.
Over a sharded sequence keys and values go around the ring once, and before them
what the pattern multiplies with each key; on each hop a shard computes the
chosen tiles that have arrived. Partials are added in that order.
Memory: lists and tiles of some blocks of queries; over a sharded sequence a bit
for each tile of a shard's queries, in a byte, and the pattern's estimates of
all its queries, for `XAttention` 8 bytes for each tile and `stride` queries.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from ringjax.errors import OptionError
from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  LocalAlgorithm,
  QGradients,
  Residuals,
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  pad_operands,
  product,
)
from ringjax.ops.attention.scores import (
  FORWARD,
  ScoreArgs,
  ScoreTile,
  Terms,
)
from ringjax.ops.attention.tiles.tile_pattern import (
  PromptTiles,
  QueryBlocks,
  TilePattern,
  required_tiles,
  tile_bounds,
  tile_extent,
)
from ringjax.ops.attention.tiles.tile_shards import TileShards
from ringjax.ops.mask import Coords, Extent, Mask
from ringjax.ops.softmax import Partial, merge, wide_dtype
from ringjax.parallel import collectives, processor
from ringjax.typing import Index

# Blocks of queries of a head whose tiles are chosen at once.
_TOGETHER = 16
# Lists that are computed together, by platform.
_ROWS = {"cpu": 8}
_ROWS_ELSEWHERE = 256
# Keys of a step, in tiles without a mask.
_KEYS = 256


class TileCounts(NamedTuple):
  """Number of tiles of each block of queries.

  Fields:
    chosen: Tiles that are computed, int32 [B, K, G, n].
    visible: Tiles that dense attention computes, int32 [B, n].
  """

  chosen: Int[Array, "B K G n"]
  visible: Int[Array, "B n"]


class ShardTiles(NamedTuple):
  """Place of a shard's tokens in a sequence of whole blocks.

  Fields:
    shards: Shards that have the tiles of keys.
    q_number: Index of each query here in the sequence, int32 [T].
  """

  shards: TileShards
  q_number: Int[Array, " T"]


@dataclasses.dataclass(frozen=True)
class _QueryParts:
  """Queries and keys of a call, whose queries are taken in parts.

  Attributes:
    pattern: Choice of the tiles.
    tiles: Queries and keys, padded.
    prepared: Arrays that the pattern prepared.
    k_extent: Coordinates of all tiles of keys, [B, n].
    parts: Number of parts.
    together: Blocks of queries of a part.
  """

  pattern: TilePattern
  tiles: PromptTiles
  prepared: PyTree
  k_extent: Extent
  parts: int
  together: int

  @property
  def size(self) -> int:
    """Number of queries of a part."""
    return self.together * self.pattern.block

  @property
  def numbers(self) -> Int[Array, " parts"]:
    """Numbers of the parts."""
    return jnp.arange(self.parts, dtype=jnp.int32)

  def rows(self, n: jax.Array) -> tuple[QueryBlocks, Bool[Array, "B m n"]]:
    """Blocks of queries of part `n`, and which tiles have no mask there."""
    x, block = self.tiles, self.pattern.block
    at = cut_coords(x.q_at, n * self.size, self.size)
    q = lax.dynamic_slice_in_dim(x.q, n * self.size, self.size, 3)
    q_extent = tile_extent(at, block)
    any_pairs, all_pairs = tile_bounds(x.mask, q_extent, self.k_extent)
    required = required_tiles(any_pairs, q_extent, self.k_extent)
    return QueryBlocks(q, at, any_pairs, required), all_pairs

  def keys(self) -> PyTree:
    """Arrays of the keys here that estimates need."""
    return () if self.pattern.keeps_all else self.pattern.keys(self.tiles)

  def estimate(self, keys: PyTree, rows: QueryBlocks) -> PyTree:
    """Estimates of the tiles of some keys."""
    if self.pattern.keeps_all:
      return ()
    return self.pattern.estimate(self.tiles, keys, rows)

  def choose(
    self, rows: QueryBlocks, estimate: PyTree
  ) -> Bool[Array, "B K G m n"]:
    """Visible tiles that the pattern chooses, and required ones."""
    visible = rows.visible[:, None, None]
    if self.pattern.keeps_all:
      shape = *self.tiles.q.shape[:3], *visible.shape[3:]
      return jnp.broadcast_to(visible, shape)
    chosen = self.pattern.choose(self.tiles, self.prepared, rows, estimate)
    return (chosen & visible) | rows.required[:, None, None]

  def counts(
    self, rows: QueryBlocks, chosen: Bool[Array, "B K G m n"]
  ) -> TileCounts:
    """Number of tiles of each block of queries."""
    return TileCounts(
      jnp.sum(chosen, -1, dtype=jnp.int32),
      jnp.sum(rows.visible, -1, dtype=jnp.int32),
    )

  def estimate_around(self, shards: TileShards) -> PyTree:
    """Estimates of all parts, from the keys of all shards.

    Args:
      shards: Shards that have the tiles of keys.

    Returns:
      Arrays [parts, ..., R, n] in the order in which tiles arrive.
    """
    keys = self.keys()
    if not jax.tree.leaves(keys):
      return ()

    def estimate(keys: PyTree, hops: Index) -> PyTree:
      arrived = shards.after_hops(hops)

      def part(n: jax.Array) -> PyTree:
        rows, _ = self.rows(n)
        rows = rows._replace(
          visible=rows.visible[..., arrived],
          required=rows.required[..., arrived],
        )
        return self.estimate(keys, rows)

      return lax.map(part, self.numbers)

    def put(arrays: PyTree, new: PyTree, hops: Index) -> PyTree:
      update = lambda a, x: lax.dynamic_update_index_in_dim(
        a, x, hops, a.ndim - 2
      )
      return jax.tree.map(update, arrays, new)

    first = estimate(keys, 0)
    shape = lambda a: (*a.shape[:-1], shards.size, a.shape[-1])
    empty = jax.tree.map(
      lambda a: collectives.zeros(shape(a), a.dtype, a), first
    )

    def step(hops: Index, state: tuple) -> tuple:
      keys, arrays = state
      keys = shards.rotate(keys)
      return keys, put(arrays, estimate(keys, hops), hops)

    state = keys, put(empty, first, 0)
    return lax.fori_loop(1, shards.size, step, state)[1]


@dataclasses.dataclass(frozen=True)
class ChosenTiles(LocalAlgorithm):
  """Local algorithm that computes the tiles of a pattern; forward only.

  Attributes:
    pattern: Choice of the tiles, among the keys of a call.
    platform: Platform, which decides how many lists are computed together.
    widens: Whether bfloat16 operands are multiplied as float32.
  """

  pattern: TilePattern
  platform: str | None = None
  widens: bool = False

  def on_device(
    self, platform: str, kind: str, alone: bool = True
  ) -> ChosenTiles:
    """Specialize to a device, as `AutoKernel.on_device` does."""
    del kind, alone
    widens = platform == "cpu" and not processor.multiplies_bfloat16()
    return dataclasses.replace(self, platform=platform, widens=widens)

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the chosen tiles of these keys into `carry`."""
    return merge(self.partial(x, args)[0], carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Refuses: tiles are chosen for prompts, which have no gradient."""
    raise OptionError(
      "pattern",
      f"a gradient through the tiles of {type(self.pattern).__name__}",
      "a forward pass",
      "call rj.sparse_attention, or rj.dot_product_attention",
    )

  def partial(
    self, x: Local, args: ScoreArgs, place: ShardTiles | None = None
  ) -> tuple[Partial, TileCounts]:
    """Partial of the queries over the chosen tiles, and the tiles' number.

    Args:
      x: Queries and keys; of a sharded sequence those of one shard.
      args: Score function.
      place: Shards of a sequence, each of whole blocks; None: all keys are in
        `x`.
    """
    context, block = args.context, self.pattern.block
    if self.widens:
      widen = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a
      x = Local(*map(widen, x))
    b, _, _, length, _ = x.q.shape
    blocks = -(-length // block)
    parts = -(-blocks // _TOGETHER)
    together = -(-blocks // parts)
    size = together * block
    x, args = pad_operands(x, args, size, block)
    with_rows = lambda at: Coords(
      *(jnp.broadcast_to(a, (b, a.shape[1])) for a in at)
    )
    q_at, k_at = with_rows(args.context.q), with_rows(args.context.k)
    if place is None:
      shards, number = None, jnp.arange(parts * size, dtype=jnp.int32)
    else:
      shards, number = place
      extra = parts * size - number.shape[0]
      number = jnp.pad(number, (0, extra), constant_values=-1)
    tiles = PromptTiles(
      x.q, x.k, q_at, k_at, args.scores, context.mask, number, shards
    )
    prepared = () if self.pattern.keeps_all else self.pattern.prepare(tiles)
    call = _QueryParts(
      self.pattern, tiles, prepared, tiles.tile_extent(block), parts, together
    )
    if shards is None:
      partial, counts = self._here(call, x, args)
    else:
      partial, counts = self._around(call, shards, x, args)

    def joined(a: jax.Array, axis: int, size: int) -> jax.Array:
      """[parts, ...] with the parts in front of `axis`, cut to `size`."""
      a = jnp.moveaxis(a, 0, axis)
      a = a.reshape(*a.shape[:axis], -1, *a.shape[axis + 2 :])
      return lax.slice_in_dim(a, 0, size, axis=axis)

    partial = Partial(*(joined(a, 3, length) for a in partial))
    return partial, TileCounts(
      joined(counts.chosen, 3, blocks), joined(counts.visible, 1, blocks)
    )

  def _here(
    self, call: _QueryParts, x: Local, args: ScoreArgs
  ) -> tuple[Partial, TileCounts]:
    """Partials and counts of all parts, from keys that are all here."""
    keys = call.keys()

    def part(n: jax.Array) -> tuple[Partial, TileCounts]:
      rows, all_pairs = call.rows(n)
      chosen = call.choose(rows, call.estimate(keys, rows))
      partial = self._lists(x, args, call.tiles.k_at, rows, chosen, all_pairs)
      return partial, call.counts(rows, chosen)

    return lax.map(part, call.numbers)

  def _around(
    self, call: _QueryParts, shards: TileShards, x: Local, args: ScoreArgs
  ) -> tuple[Partial, TileCounts]:
    """Partials and counts of all parts; keys go around the ring."""
    estimates = call.estimate_around(shards)
    columns = jnp.argsort(_arrivals(shards).reshape(-1))

    def choose(operands: tuple) -> tuple[jax.Array, TileCounts]:
      n, estimate = operands
      rows, _ = call.rows(n)
      in_order = lambda a: a.reshape(*a.shape[:-2], -1)[..., columns]
      chosen = call.choose(rows, jax.tree.map(in_order, estimate))
      return chosen, call.counts(rows, chosen)

    chosen, counts = lax.map(choose, (call.numbers, estimates))

    def hop(keys: tuple, hops: Index, partial: Partial) -> Partial:
      """Fold the chosen tiles of the keys that are here after some hops."""
      k, v, k_at = keys
      arrived = shards.after_hops(hops)

      def fold(operands: tuple) -> Partial:
        n, chosen, partial = operands
        rows, all_pairs = call.rows(n)
        arrived_tiles = chosen[..., arrived], all_pairs[..., arrived]
        local = Local(x.q, k, v)
        new = self._lists(local, args, k_at, rows, *arrived_tiles)
        return merge(new, partial)

      return lax.map(fold, (call.numbers, chosen, partial))

    def by_part(a: jax.Array) -> jax.Array:
      shape = *a.shape[:3], call.parts, call.size, *a.shape[4:]
      return jnp.moveaxis(a.reshape(shape), 3, 0)

    start = empty_partial(x)
    varying = collectives.varying_axes(x, call.tiles.k_at, chosen)
    start = collectives.vary(jax.tree.map(by_part, start), varying)
    keys = x.k, x.v, call.tiles.k_at

    def step(hops: Index, state: tuple) -> tuple:
      keys, partial = state
      keys = shards.rotate(keys)
      return keys, hop(keys, hops, partial)

    state = keys, hop(keys, 0, start)
    return lax.fori_loop(1, shards.size, step, state)[1], counts

  def _lists(
    self,
    x: Local,
    args: ScoreArgs,
    k_at: Coords,
    rows: QueryBlocks,
    chosen: Bool[Array, "B K G m n"],
    all_pairs: Bool[Array, "B m n"],
  ) -> Partial:
    """Partial of some blocks of queries, each over its list of tiles."""
    b, kv_heads, group, m, tiles = chosen.shape
    block, dim = self.pattern.block, x.q.shape[-1]
    by_tile = lambda a: a.reshape(b * kv_heads, tiles, block, a.shape[-1])
    keys, values = by_tile(x.k), by_tile(x.v)
    k_pos, k_seg = (a.reshape(b, tiles, block) for a in k_at)
    q_pos, q_seg = (a.reshape(b, m, block) for a in rows.at)
    queries = rows.q.reshape(-1, block, dim)
    unmasked = chosen & all_pairs[:, None, None] & args.plain
    flat = lambda a: a.reshape(-1, tiles)
    unmasked, chosen = flat(unmasked), flat(chosen)
    count = lambda a: jnp.sum(a, 1, dtype=jnp.int32)
    unmasked_count, masked_count = count(unmasked), count(chosen & ~unmasked)
    # Tiles without a mask first, then those with one, then the others.
    rank = jnp.where(unmasked, 0, jnp.where(chosen, 1, 2))
    lists = jnp.argsort(rank, 1, stable=True).astype(jnp.int32)
    total = queries.shape[0]
    by_length = jnp.argsort(-(unmasked_count + masked_count)).astype(jnp.int32)
    platform = self.platform or jax.default_backend()
    size = min(total, _ROWS.get(platform, _ROWS_ELSEWHERE))
    batches = -(-total // size)
    padded = jnp.pad(
      by_length, (0, batches * size - total), constant_values=total
    )
    # Coordinates are passed tile by tile.
    args = args._replace(terms=Terms())

    def batch(numbers: Int[Array, " r"]) -> Partial:
      real, row = numbers < total, jnp.minimum(numbers, total - 1)
      example = row // (kv_heads * group * m)
      head, place = row // (group * m), row % m
      q, row_lists = queries[row][:, None, None], lists[row]
      at = Coords(q_pos[example, place], q_seg[example, place])
      first_masked = unmasked_count[row]

      def fold(masked: bool, partial: Partial) -> Partial:
        width = 1 if masked else max(1, min(tiles, _KEYS // block))
        counts = masked_count if masked else unmasked_count
        counts = jnp.where(real, counts[row], 0)
        offsets = jnp.arange(width, dtype=jnp.int32)[None]

        def step(n: Index, partial: Partial) -> Partial:
          places = jnp.asarray(n, jnp.int32) * width + offsets
          present = places < counts[:, None]
          start = first_masked if masked else jnp.zeros_like(first_masked)
          slots = jnp.minimum(start[:, None] + places, tiles - 1)
          number = jnp.take_along_axis(row_lists, slots, 1)
          take = lambda a: a[head[:, None], number].reshape(
            size, 1, width * block, -1
          )
          k, v = take(keys), take(values)
          of_tiles = lambda a: a[example[:, None], number]
          seg = jnp.where(present[..., None], of_tiles(k_seg), 0)
          tile_at = Coords(
            of_tiles(k_pos).reshape(size, -1), seg.reshape(size, -1)
          )
          tile = ScoreTile(args, FORWARD, 0, 0, at, tile_at)
          s = product("bkgqh,bkth->bkgqt", q, k)
          flag = None
          if masked:
            flag = finite_flag(v, wide_dtype(v.dtype))
          else:
            absent = jnp.repeat(~present, block, 1)[:, None, None, None]
            s = jnp.where(absent, -jnp.inf, s)
            # Numbers that are not finite stay so if they are multiplied by 0.
            v = jnp.where(absent[:, 0, 0, 0][:, None, :, None], 0, v)
          return fold_tile(tile, s, v, flag, partial)

        steps = -(-jnp.max(counts) // width)
        return loop(steps, step, partial)

      local = Local(q, keys[:1, :1], values[:1, :1])
      start = empty_partial(local)
      start = collectives.vary(start, collectives.varying_axes(x, k_at, chosen))
      return fold(True, fold(False, start))

    partial = lax.map(batch, padded.reshape(batches, size))
    back = jnp.argsort(by_length)
    shape = (b, kv_heads, group, m * block)
    return Partial(
      *(
        a.reshape(batches * size, block, *a.shape[5:])[back].reshape(
          *shape, *a.shape[5:]
        )
        for a in partial
      )
    )


def _arrivals(shards: TileShards) -> Int[Array, "R n"]:
  """Indices of the tiles that are here after 0, 1, ... hops."""
  hops = jnp.arange(shards.size, dtype=jnp.int32)
  return jax.vmap(shards.after_hops)(hops)


def check_mask(mask: Mask) -> None:
  """Refuses a mask that contains arrays.

  Raises:
    OptionError: If the mask has arrays.
  """
  if jax.tree.leaves(mask):
    raise OptionError(
      "mask",
      f"a {type(mask).__name__} with arrays",
      "a mask of numbers, such as Causal() or Window(4096)",
      "pass segment ids, or call rj.dot_product_attention",
    )
