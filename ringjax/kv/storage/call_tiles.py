"""Tiles of a call's tokens, which pass through each layer one after another.

Guarantees: the size of a token's tile follows from the token's position, so
that its numbers depend on nothing else that a call holds, nor on the place of a
chunk's first token. Early positions are in small tiles, so that a short prompt
costs little, later ones in larger ones, of which products are faster.
Cost: a layer's weights are read once for a call, and each tile costs its size;
the room of a call costs nothing. The last tile of a prompt, which may be partly
empty, is a quarter of the tokens before it at most, or of the smallest size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from ringjax import tree
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.base import CallCache

# A tile serves positions from this many times its size.
_BEFORE = 4
# Ratio of the sizes of tiles.
_GROWTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTiles:
  """Tiles of one size, of a call of B rows of T tokens; an argument of jit.

  Attributes:
    row: Row of each tile, int32 [n]; the tiles of a row in their order.
    start: Index of the tile's first token among the T, int32 [n].
    filled: Number of its tokens, int32 [n]; places after them are empty.
    count: Number of the n that hold tokens, int32 []; they come first.
    size: Number of tokens for which a tile has room.
  """

  row: Int[Array | np.ndarray, " n"]
  start: Int[Array | np.ndarray, " n"]
  filled: Int[Array | np.ndarray, " n"]
  count: Int[Array | np.ndarray, ""]
  size: int


tree.register(CallTiles, ("row", "start", "filled", "count"), ("size",))


def tile_sizes(smallest: int, width: int) -> tuple[int, ...]:
  """Sizes of the tiles of rows of `width` tokens, ascending."""
  sizes = [min(smallest, width)]
  while sizes[-1] * _GROWTH <= width:
    sizes.append(sizes[-1] * _GROWTH)
  return tuple(sizes)


def tiles_of(
  positions: Sequence[int],
  lengths: Sequence[int],
  width: int,
  sizes: tuple[int, ...],
) -> tuple[CallTiles, ...]:
  """Tiles of each size for chunks of prompts.

  Args:
    positions: Position of the first token of each of the B rows.
    lengths: Number of tokens of each row.
    width: Maximum number of tokens of a row.
    sizes: Sizes of the tiles, by `tile_sizes`.
  """
  first_positions = [0, *(size * _BEFORE for size in sizes[1:])]
  last_positions = [*first_positions[1:], 1 << 62]
  levels = []
  for size, low, high in zip(
    sizes, first_positions, last_positions, strict=True
  ):
    tiles = [
      (row, start, min(size, end - start))
      for row, (pos, length) in enumerate(zip(positions, lengths, strict=True))
      for end in (min(max(high - pos, 0), length),)
      for start in range(max(low - pos, 0), end, size)
    ]
    arrays = np.zeros((3, len(lengths) * -(-width // size)), np.int32)
    arrays[:, : len(tiles)] = np.asarray(tiles, np.int32).reshape(-1, 3).T
    row, start, filled = arrays
    levels.append(
      CallTiles(
        row=row,
        start=start,
        filled=filled,
        count=np.asarray(len(tiles), np.int32),
        size=size,
      )
    )
  return tuple(levels)


class CacheTile(NamedTuple):
  """One tile of a call, and the cache as the tile's tokens see it.

  Fields:
    row: Row of the tile, int32 [].
    start: Index of its first token, int32 [].
    is_filled: Whether each of its t places holds a token, bool [1, t].
    cache: Cache of the call for this tile alone, a batch of one row; None where
      only places are used.
  """

  row: Index
  start: Index
  is_filled: jax.Array
  cache: CallCache | None

  def take(self, x: Shaped[Array, "B T *d"]) -> Shaped[Array, "1 t *d"]:
    """The tile's part of an array of the call's tokens."""
    sizes = (1, self.is_filled.shape[1], *x.shape[2:])
    return lax.dynamic_slice(x, self._at(x), sizes)

  def put(
    self, x: Shaped[Array, "B T *d"], new: Shaped[Array, "1 t *d"]
  ) -> Shaped[Array, "B T *d"]:
    """An array of the call's tokens with those of the tile replaced."""
    is_filled = self.is_filled.reshape(1, -1, *(1,) * (x.ndim - 2))
    # Places after the tile's tokens may belong to another tile.
    new = jnp.where(is_filled, new.astype(x.dtype), self.take(x))
    return lax.dynamic_update_slice(x, new, self._at(x))

  def take_row(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "1 ..."]:
    """The part of the tile's row in an array of the call's rows."""
    return lax.dynamic_slice_in_dim(x, self.row, 1, 0)

  def _at(self, x: jax.Array) -> tuple[Any, ...]:
    return (self.row, self.start, *(jnp.int32(0) for _ in x.shape[2:]))
