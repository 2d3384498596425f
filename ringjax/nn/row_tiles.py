"""Tokens of several calls in tiles of rows, which pass each product together.

Guarantees: a row's product depends on that row alone, not on its tile, nor on
the calls that have tokens. What tiles without tokens hold is undefined.
Cost: a product reads its weight once for all calls, in place in the stack of
layers, and computes the tiles that hold tokens, see `ops.flat_product_tpu`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ringjax.nn.weights.layer_array import LayerArray
from ringjax.ops.flat_product_tpu import (
  LiveTiles,
  flat_gated,
  flat_product,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiles:
  """Places of the tokens of several calls in tiles of rows.

  Each call begins with a tile of its own.

  Attributes:
    shapes: Number of rows and of tokens of a row, (B, T), of each call.
    size: Number of tokens for which a tile has room.
    live: Tiles that hold tokens.
  """

  shapes: tuple[tuple[int, int], ...]
  size: int
  live: LiveTiles

  @classmethod
  def of(cls, segments: Sequence[Int[Array, "B T"]], size: int) -> RowTiles:
    """Tiles of this size for calls whose tokens have these segments."""
    tokens = _joined(segments, size) > 0
    live = LiveTiles.of(jnp.any(tokens, 1))
    shapes = tuple((x.shape[0], x.shape[1]) for x in segments)
    return cls(shapes=shapes, size=size, live=live)

  def joined(
    self, arrays: Sequence[Shaped[Array, "_ _ ..."]]
  ) -> Shaped[Array, "tiles size ..."]:
    """Tiles of each call's array [B or 1, T, ...]."""
    pairs = zip(arrays, self.shapes, strict=True)
    return _joined(
      [jnp.broadcast_to(x, (*shape, *x.shape[2:])) for x, shape in pairs],
      self.size,
    )

  def split(
    self, x: Shaped[Array, "tiles size ..."]
  ) -> list[Shaped[Array, "_ _ ..."]]:
    """Each call's array [B, T, ...] of an array of tiles."""
    rows, parts, start = x.reshape(-1, *x.shape[2:]), [], 0
    for b, t in self.shapes:
      part = lax.slice_in_dim(rows, start, start + b * t)
      parts.append(part.reshape(b, t, *rows.shape[1:]))
      start += -(-b * t // self.size) * self.size
    return parts

  def product(
    self,
    x: Float[Array, "tiles size *in"],
    weight: LayerArray | Float[Array, ...],
    contracted: int,
  ) -> Float[Array, "tiles size *out"]:
    """Product of the tokens with a weight [*in, *out].

    Args:
      x: Tokens, of the weight's dtype.
      weight: Weight of a layer.
      contracted: Number of axes in `in`.
    """
    stacked, index = _in_place(weight)
    shape = stacked.shape[len(index) :]
    # Inputs in one axis are the same memory; outputs in one axis are not.
    lead, inner = stacked.shape[: len(index)], math.prod(shape[:contracted])
    stacked = stacked.reshape(*lead, inner, *shape[contracted:])
    rows = x.reshape(*x.shape[:2], -1)
    y = flat_product(rows, stacked, self.live, index)
    return y.reshape(*y.shape[:2], *shape[contracted:])

  def gated(
    self,
    x: Float[Array, "tiles size D"],
    gate: LayerArray | Float[Array, "D F"],
    up: LayerArray | Float[Array, "D F"],
    combine: Callable[[Array, Array], Array],
  ) -> Float[Array, "tiles size F"]:
    """`combine` of the products with two weights, number by number."""
    (stacked_gate, index), (stacked_up, _) = _in_place(gate), _in_place(up)
    weights = stacked_gate, stacked_up
    return flat_gated(x, weights, self.live, index, combine)


def _joined(
  arrays: Sequence[Shaped[Array, "_ _ ..."]], size: int
) -> Shaped[Array, "tiles size ..."]:
  """Tiles of rows of arrays of calls, each call's padded to whole tiles."""

  def padded(x: Array) -> Array:
    rows = x.reshape(-1, *x.shape[2:])
    return jnp.pad(rows, [(0, -rows.shape[0] % size)] + [(0, 0)] * (x.ndim - 2))

  rows = jnp.concatenate([padded(x) for x in arrays])
  return rows.reshape(-1, size, *rows.shape[1:])


def _in_place(
  weight: LayerArray | Float[Array, ...],
) -> tuple[Float[Array, ...], tuple[Int[Array, ""], ...]]:
  """A layer's weight, or the stack that it is in, and its place there."""
  if isinstance(weight, LayerArray):
    return weight.stacked, (weight.layer,)
  return weight, ()


_CURRENT: contextvars.ContextVar[RowTiles | None] = contextvars.ContextVar(
  "ringjax_row_tiles", default=None
)


@contextlib.contextmanager
def in_row_tiles(tiles: RowTiles) -> Iterator[None]:
  """Tell linear maps, while layers are traced, that their rows are in tiles."""
  token = _CURRENT.set(tiles)
  try:
    yield
  finally:
    _CURRENT.reset(token)


def current_row_tiles() -> RowTiles | None:
  """Tiles of the rows of the layers that are traced; None: rows of one call."""
  return _CURRENT.get()
