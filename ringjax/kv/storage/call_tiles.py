"""Tiles of a call's tokens, which pass through each layer one after another.

Guarantees: a tile has the same shape whatever the call holds, so that a token's
numbers depend neither on the number of tiles nor on what the others hold.
Cost: a layer's weights are read once for a call, and each tile costs its own
tokens; empty tiles cost nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from ringjax import tree
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTiles:
  """Tiles of a call of B rows of T tokens; an argument of jit.

  Attributes:
    row: Row of each tile, int32 [n]; the tiles of a row in their order.
    start: Index of the tile's first token among the T, int32 [n].
    count: Number of the n that hold tokens, int32 []; they come first.
    size: Number of tokens of a tile, a divisor of T.
  """

  row: Int[ArrayLeaf, " n"]
  start: Int[ArrayLeaf, " n"]
  count: Int[ArrayLeaf, ""]
  size: int

  @classmethod
  def of(cls, lengths: np.ndarray, width: int, size: int) -> CallTiles:
    """Tiles that hold the first tokens of rows.

    Args:
      lengths: Number of tokens of each row, int [B].
      width: Number of tokens for which a row has room, T, a multiple of `size`.
      size: Number of tokens of a tile.
    """
    per_row = -(-np.asarray(lengths) // size)
    count = int(per_row.sum())
    row, start = np.zeros((2, per_row.size * (width // size)), np.int32)
    row[:count] = np.repeat(np.arange(per_row.size), per_row)
    first = np.cumsum(per_row) - per_row
    start[:count] = (np.arange(count) - first[row[:count]]) * size
    return cls(row=row, start=start, count=np.asarray(count, np.int32), size=size)


tree.register(CallTiles, ("row", "start", "count"), ("size",))


class CacheTile(NamedTuple):
  """One tile of a call, and the cache as the tile's tokens see it.

  Fields:
    row: Row of the tile, int32 [].
    start: Index of its first token, int32 [].
    size: Number of its tokens.
    cache: Cache of the call for this tile alone, a batch of one row.
  """

  row: Index
  start: Index
  size: int
  cache: Any

  def take(self, x: Shaped[Array, "B T *d"]) -> Shaped[Array, "1 t *d"]:
    """The tile's part of an array of the call's tokens."""
    sizes = (1, self.size, *x.shape[2:])
    return lax.dynamic_slice(x, self._at(x), sizes)

  def put(
    self, x: Shaped[Array, "B T *d"], new: Shaped[Array, "1 t *d"]
  ) -> Shaped[Array, "B T *d"]:
    """An array of the call's tokens with the tile's part replaced."""
    return lax.dynamic_update_slice(x, new.astype(x.dtype), self._at(x))

  def take_row(self, x: Shaped[Array, "B *d"]) -> Shaped[Array, "1 *d"]:
    """The part of the tile's row in an array of the call's rows."""
    return lax.dynamic_slice_in_dim(x, self.row, 1, 0)

  def _at(self, x: jax.Array) -> tuple[Any, ...]:
    return (self.row, self.start, *(jnp.int32(0) for _ in x.shape[2:]))
