"""Whole tiles of a sequence that is sharded over a mesh axis.

Guarantees: a tile is a block of neighbouring tokens of the sequence, whatever
the layout, so that a choice of tiles is that of one device. Where each shard
holds whole blocks tokens stay; else they are dealt to the shards block by
block, and results are sent back.
Cost: nothing where blocks are whole; else each token is sent once there and
each result once back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ringjax.errors import OptionError
from ringjax.parallel import collectives
from ringjax.parallel.layout import Contiguous, Layout, Striped, Zigzag
from ringjax.typing import Index

Tree = TypeVar("Tree")
# Mesh axis, or several that are numbered as one.
AxisName = str | tuple[str, ...]


def check_layout(layout: Layout) -> None:
  """Refuse layouts that have no whole blocks and are not dealt by chunks.

  Raises:
    OptionError: If it is not Contiguous, Striped or Zigzag.
  """
  if not isinstance(layout, Contiguous | Striped | Zigzag):
    raise OptionError(
      "layout",
      repr(layout),
      "Contiguous(), Striped() or Zigzag() around tiles",
      "pass one of these, or call rj.dot_product_attention",
    )


def whole_blocks(
  layout: Layout, shards: int, local_length: int, block: int
) -> bool:
  """Whether each shard's tokens are whole blocks of the sequence."""
  if shards == 1:
    return True
  if local_length % block:
    return False
  if isinstance(layout, Striped):
    return layout.block % block == 0
  if isinstance(layout, Zigzag):
    return local_length // 2 % block == 0
  return isinstance(layout, Contiguous)


def block_layout(
  layout: Layout, shards: int, local_length: int, block: int
) -> tuple[Layout, int]:
  """Layout in which tiles are computed, and the tokens of a shard in it.

  It is `layout` where blocks are whole, else stripes of one block.
  """
  if whole_blocks(layout, shards, local_length, block):
    return layout, local_length
  striped = Striped(block)
  return striped, striped.local_length(shards * local_length, shards)


def tile_owners(
  layout: Layout, shards: int, local_length: int, block: int
) -> Int[np.ndarray, " n"]:
  """Shard that computes each block of queries of the sequence.

  Args:
    layout: Order of the tokens on the shards.
    shards: Number of shards.
    local_length: Number of tokens of a shard, with padding.
    block: Number of tokens of a block.
  """
  layout, local_length = block_layout(layout, shards, local_length, block)
  blocks = -(-local_length // block)
  starts = np.minimum(np.arange(blocks) * block, local_length - 1)
  first = layout.position_of(
    np.arange(shards)[:, None], starts, shards, local_length
  )
  owners = np.zeros(shards * blocks, np.int32)
  owners[first // block] = np.arange(shards)[:, None]
  return owners


@dataclasses.dataclass(frozen=True)
class TileShards:
  """Shards that each hold some of a sequence's whole tiles of keys.

  Attributes:
    axis: Manual axis of the shards.
    number: Index in the sequence of each tile of each shard, int32 [R, n].
  """

  axis: AxisName
  number: Int[Array, "R n"]

  @classmethod
  def of(
    cls, axis: AxisName, layout: Layout, local_length: int, block: int
  ) -> TileShards:
    """Tiles of a layout in which each shard holds whole blocks."""
    shards = collectives.axis_size(axis)
    positions = jax.vmap(lambda i: layout.positions(i, shards, local_length))
    first = positions(jnp.arange(shards, dtype=jnp.int32))[:, ::block]
    return cls(axis, first // block)

  @property
  def size(self) -> int:
    """Number of shards."""
    return self.number.shape[0]

  @property
  def tiles(self) -> int:
    """Number of tiles of the sequence."""
    return self.number.size

  def after_hops(self, hops: Index) -> Int[Array, " n"]:
    """Indices of the tiles that are here after a number of hops."""
    shard = (collectives.axis_index(self.axis) - hops) % self.size
    return self.number[shard]

  def rotate(self, tree: Tree) -> Tree:
    """Send arrays to the next shard of the ring."""
    return collectives.rotate(tree, self.axis, 1)

  def gather(self, tree: Tree, axis: int) -> Tree:
    """Bring small arrays of all shards' tiles here, in the sequence's order.

    Args:
      tree: Arrays of a shard's tiles.
      axis: Dimension of the tiles.
    """
    order = jnp.argsort(self.number.reshape(-1))

    def gathered(x: jax.Array) -> jax.Array:
      return jnp.take(collectives.gather(x, self.axis, axis), order, axis)

    return jax.tree.map(gathered, tree)

  def total(self, tree: Tree) -> Tree:
    """Sum arrays over the shards."""
    return self._varying(tree, collectives.total(tree, self.axis))

  def largest(self, tree: Tree) -> Tree:
    """Maximum of arrays over the shards."""
    return self._varying(tree, collectives.largest(tree, self.axis))

  def _varying(self, like: Tree, tree: Tree) -> Tree:
    axes = collectives.varying_axes(like) | {*collectives.names(self.axis)}
    return collectives.vary(tree, axes)


class BlockDeal:
  """Tokens of a layout without whole blocks, dealt in stripes of a block.

  Attributes:
    layout: Layout afterwards, `Striped(block)`.
    local_length: Number of tokens of a shard afterwards, with padding.
  """

  def __init__(
    self, axis: AxisName, layout: Layout, local_length: int, block: int
  ):
    """Plan the exchange.

    Args:
      axis: Manual axis of the shards.
      layout: Order of the tokens before.
      local_length: Number of tokens of a shard before.
      block: Number of tokens of a stripe.
    """
    shards = collectives.axis_size(axis)
    self.axis, self._before = axis, local_length
    self.layout, self.local_length = block_layout(
      layout, shards, local_length, block
    )
    shard, slot = np.arange(shards)[:, None], np.arange(local_length)
    owner = layout.position_of(shard, slot, shards, local_length)
    owner = owner // block % shards
    max_count = max(
      int(np.bincount(row, minlength=shards).max()) for row in np.asarray(owner)
    )
    pos = layout.positions(collectives.axis_index(axis), shards, local_length)
    to = pos // block % shards
    order = jnp.argsort(to, stable=True)
    count = jnp.sum(to[None] == jnp.arange(shards)[:, None], 1)
    first = jnp.cumsum(count) - count
    place = jnp.arange(max_count, dtype=jnp.int32)[None]
    slots = order[jnp.minimum(first[:, None] + place, local_length - 1)]
    # Slots of this shard by the shard that gets them; `local_length` for none.
    present = place < count[:, None]
    self._sent = jnp.where(present, slots, local_length).reshape(-1)
    target = pos // block // shards * block + pos % block
    target = target[jnp.minimum(self._sent, local_length - 1)]
    target = jnp.where(present.reshape(-1), target, self.local_length)
    self._received = collectives.exchange(target, axis, 0, 0)

  def to_blocks(self, tree: Tree) -> Tree:
    """Deal arrays of tokens, [B, T, ...]; padding is 0."""
    return self._moved(tree, self._sent, self._received, self.local_length)

  def from_blocks(self, tree: Tree) -> Tree:
    """Send arrays of dealt tokens back to the shards and slots before."""
    return self._moved(tree, self._received, self._sent, self._before)

  def _moved(
    self,
    tree: Any,
    take: Int[Array, " n"],
    put: Int[Array, " n"],
    length: int,
  ) -> Any:
    def moved(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B t ..."]:
      x = x[:, jnp.minimum(take, x.shape[1] - 1)]
      x = collectives.exchange(x, self.axis, 1, 1)
      shape = (x.shape[0], length, *x.shape[2:])
      zeros = collectives.zeros(shape, x.dtype, (x, put))
      return zeros.at[:, put].set(x, mode="drop")

    return jax.tree.map(moved, tree)
