"""The contract of a pattern: which tiles of keys a block of queries reads.

A tile is `block` neighbouring queries and `block` neighbouring keys. A pattern
chooses, for each query head and block of queries, tiles that the call's mask
shows; of a chosen tile a query reads the keys that the mask shows. Always read
are the tiles of a block's own positions and its first visible one. Padding is
never counted, and no choice depends on other rows of a batch.

Queries and keys may be sharded: a shard then has some blocks of queries and
some tiles of keys, and chooses among the tiles of all shards for its queries. A
pattern gathers small arrays of the tiles (`PromptTiles.gather`); what it
multiplies with each key (`keys`) goes around the ring.

A new pattern is a file with a subclass of `TilePattern`, an entry in
`patterns.py` and a case in `tests/ops/attention/tiles`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.checks import number, one_of
from ringjax.errors import OptionError
from ringjax.ops.attention.scores import Scores
from ringjax.ops.attention.tiles.tile_shards import TileShards
from ringjax.ops.mask import Coords, Extent, Mask, extent

Tree = TypeVar("Tree")
# Tokens of a block.
BLOCKS = (64, 128)


class PromptTiles(NamedTuple):
  """Queries and keys of a call, padded to whole blocks by empty tokens.

  Of a sharded sequence they are those of one shard.

  Fields:
    q: Queries, [B, K, G, T, H].
    k: Keys, [B, K, S, H].
    q_at: Coordinates of the queries, [B, T].
    k_at: Coordinates of the keys, [B, S].
    scores: Static part of the score function.
    mask: Pairs that are visible.
    q_number: Index of each query in the sequence, int32 [T].
    shards: Shards that have the tiles of keys; None: all are here.
  """

  q: Float[Array, "B K G T H"]
  k: Float[Array, "B K S H"]
  q_at: Coords
  k_at: Coords
  scores: Scores
  mask: Mask
  q_number: Int[Array, " T"]
  shards: TileShards | None = None

  def gather(self, tree: Tree, axis: int) -> Tree:
    """Bring small arrays of all tiles of keys here, in the sequence's order.

    Args:
      tree: Arrays of this shard's tiles of keys.
      axis: Dimension of the tiles.
    """
    return tree if self.shards is None else self.shards.gather(tree, axis)

  def total(self, tree: Tree) -> Tree:
    """Sum arrays over the shards."""
    return tree if self.shards is None else self.shards.total(tree)

  def largest(self, tree: Tree) -> Tree:
    """Maximum of arrays over the shards."""
    return tree if self.shards is None else self.shards.largest(tree)

  def tile_extent(self, block: int) -> Extent:
    """Smallest and largest coordinates of all tiles of keys, each [B, n]."""
    return self.gather(tile_extent(self.k_at, block), 1)


class QueryBlocks(NamedTuple):
  """Some blocks of queries, and the tiles that they may or must read.

  Fields:
    q: Queries, [B, K, G, t, H], t of `block` tokens each.
    at: Coordinates of the queries, [B, t].
    visible: Tiles of which a pair may be visible, bool [B, m, n].
    required: Visible tiles that are always read, bool [B, m, n].
  """

  q: Float[Array, "B K G t H"]
  at: Coords
  visible: Bool[Array, "B m n"]
  required: Bool[Array, "B m n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilePattern(abc.ABC):
  """Base class of the patterns: frozen dataclasses of numbers and words.

  Attributes:
    block: Number of tokens of a block of queries and of keys, 64 or 128.
    max_left_out: Largest part of a layer's attention that a prompt may leave
      out, measured at sampled queries; None: no limit.
  """

  block: int = 128
  max_left_out: int | float | None = None

  def __post_init__(self) -> None:
    one_of("block", self.block, BLOCKS)
    if self.max_left_out is not None:
      share("max_left_out", self.max_left_out)

  @property
  @abc.abstractmethod
  def keeps_all(self) -> bool:
    """Whether every visible tile is chosen, as dense attention does."""

  def prepare(self, x: PromptTiles) -> PyTree:
    """Compute arrays of the whole call that `choose` needs."""
    del x
    return ()

  def keys(self, x: PromptTiles) -> PyTree:
    """Arrays of the keys here that `estimate` needs; they go around the ring.

    A pattern without estimates at each key has none.
    """
    del x
    return ()

  def estimate(self, x: PromptTiles, keys: PyTree, rows: QueryBlocks) -> PyTree:
    """Estimate, of some blocks of queries and the tiles of some keys.

    Args:
      x: Queries and keys of the call.
      keys: Result of `keys`, of this shard or of another one.
      rows: Blocks of queries, and which of the keys' tiles they see.

    Returns:
      Arrays [B, K, G, ..., n], with the keys' tiles last.
    """
    del x, keys, rows
    return ()

  @abc.abstractmethod
  def choose(
    self, x: PromptTiles, prepared: PyTree, rows: QueryBlocks, estimate: PyTree
  ) -> Bool[Array, "B K G m n"]:
    """Choose the tiles of some blocks of queries.

    Args:
      x: Queries and keys of the call.
      prepared: Result of `prepare`.
      rows: Blocks of queries; tiles that are not visible are left out of the
        result, and required ones are added, by the caller.
      estimate: Result of `estimate` for all tiles, in the sequence's order.
    """


def share(name: str, value: object) -> float:
  """Check that an option is a number from 0 to 1, and return it."""
  checked = number(name, value)
  if not 0 <= checked <= 1:
    raise OptionError(
      name,
      repr(value),
      "a number from 0 to 1",
      f"pass {name}=0.9, for instance",
    )
  return checked


def tile_extent(at: Coords, size: int) -> Extent:
  """Smallest and largest coordinates of blocks of tokens, each [B, n].

  Args:
    at: Coordinates, [B, n * size].
    size: Number of tokens of a block.
  """
  blocks = lambda x: x.reshape(x.shape[0], -1, size)
  return extent(Coords(blocks(at.pos), blocks(at.seg)))


def tile_bounds(
  mask: Mask, q: Extent, k: Extent
) -> tuple[Bool[Array, "B m n"], Bool[Array, "B m n"]]:
  """Whether some, and whether all, pairs of each tile may be visible.

  Args:
    mask: Pairs that are visible.
    q: Coordinates of blocks of queries, [B, m].
    k: Coordinates of blocks of keys, [B, n].
  """
  rows = jax.tree.map(lambda x: x[:, :, None], q)
  columns = jax.tree.map(lambda x: x[:, None], k)
  any_pairs, all_pairs = mask.bound(rows, columns)
  return (
    any_pairs & rows.some & columns.some,
    all_pairs & rows.all & columns.all,
  )


def required_tiles(
  visible: Bool[Array, "B m n"], q: Extent, k: Extent
) -> Bool[Array, "B m n"]:
  """Tiles that are always read: of the own positions, and the first one."""
  rows = jax.tree.map(lambda x: x[:, :, None], q)
  columns = jax.tree.map(lambda x: x[:, None], k)
  own_tiles = (columns.first <= rows.last) & (columns.last >= rows.first)
  starts = jnp.where(visible, columns.first, jnp.iinfo(jnp.int32).max)
  number = jnp.arange(visible.shape[2])[None, None]
  first = jnp.argmin(starts, 2)[..., None] == number
  return visible & (own_tiles | first)


def largest_first(
  mass: Float[Array, "B K G m n"],
  rows: QueryBlocks,
  threshold: float,
  least: int = 0,
) -> Bool[Array, "B K G m n"]:
  """Smallest set of tiles whose mass reaches a part of the whole.

  Required tiles are in it first. Where the mass is not a number all visible
  tiles are chosen, so that the result is not a number either.

  Args:
    mass: Attention that each tile gets, any positive multiple of it.
    rows: Blocks of queries.
    threshold: Part of the mass.
    least: Number of tiles to choose at least.
  """
  visible = rows.visible[:, None, None]
  required = rows.required[:, None, None]
  mass = jnp.where(visible, mass, 0)
  total = jnp.sum(mass, -1, keepdims=True)
  rank_by = jnp.where(required, jnp.inf, jnp.where(visible, mass, -1.0))
  order = jnp.argsort(-rank_by, -1)
  ordered = jnp.take_along_axis(mass, order, -1)
  mass_before = jnp.cumsum(ordered, -1) - ordered
  wanted = ~(mass_before >= threshold * total)
  if least:
    number = jnp.arange(mass.shape[-1])[None, None, None, None]
    wanted |= number < least
  return jnp.take_along_axis(wanted, jnp.argsort(order, -1), -1)


def without_padding(
  x: Shaped[Array, "B *heads T H"], at: Coords
) -> Shaped[Array, "B *heads T H"]:
  """Set the vectors of padding to 0."""
  real = at.seg != 0
  real = real.reshape(real.shape[0], *(1,) * (x.ndim - 3), real.shape[1], 1)
  return jnp.where(real, x, jnp.zeros_like(x))


def last_queries(
  x: PromptTiles, count: int
) -> tuple[Float[Array, "B K G c H"], Coords]:
  """Last queries of each row that are no padding, and their coordinates.

  Rows with fewer queries repeat their first one, as padding.
  """
  number = x.q_number[None]
  last = x.largest(jnp.max(jnp.where(x.q_at.seg != 0, number, 0), 1))
  at = last[:, None] - jnp.arange(count - 1, -1, -1, dtype=jnp.int32)[None]
  real, at = at >= 0, jnp.maximum(at, 0)
  if x.shards is None:
    slot, present = at, None
  else:
    matches = at[:, :, None] == number[:, None]
    slot, present = jnp.argmax(matches, 2), jnp.any(matches, 2)

  def take(a: jax.Array, axis: int) -> jax.Array:
    dims = a.ndim - axis - 1
    shape = at.shape[0], *(1,) * (axis - 1), count, *(1,) * dims
    a = jnp.take_along_axis(a, slot.reshape(shape), axis)
    if present is None:
      return a
    # One shard has the query; its numbers are added to zeros.
    a = jnp.where(present.reshape(shape), a, jnp.zeros_like(a))
    return x.total(a)

  pos, seg = (take(a, 1) for a in x.q_at)
  return take(x.q, 3), Coords(pos, jnp.where(real, seg, 0))
