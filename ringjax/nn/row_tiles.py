"""Tokens of several calls in tiles of rows, which pass each product together.

Guarantees: a token's numbers depend on that token alone, not on its tile, nor
on which calls have tokens: one program computes any of them, products as in
`ops.flat_product_tpu`, and what is between them in a loop over tiles. What
tiles without tokens hold is undefined.
Cost: a product reads its weight once for all calls, in place in the stack of
layers. Tiles without tokens cost nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.nn.weights.layer_array import LayerArray
from ringjax.ops.attention.blockwise import loop
from ringjax.ops.flat_product_tpu import (
  LiveTiles,
  flat_gated,
  flat_product,
)
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiles:
  """Places of the tokens of several calls in tiles of rows.

  The first token of a call is the first of a tile.

  Attributes:
    calls: Whether each of a call's places holds a token, bool [B, T].
    size: Number of rows of a tile.
    live: Tiles that hold tokens.
    present: 1 for each call that has tokens, else 0, int32 [].
  """

  calls: tuple[Bool[Array, "_ _"], ...]
  size: int
  live: LiveTiles
  present: tuple[Int[Array, ""], ...]

  @classmethod
  def of(cls, segments: Sequence[Int[Array, "_ _"]], size: int) -> RowTiles:
    """Tiles of this size for calls whose tokens have these segments."""
    calls = tuple(x > 0 for x in segments)
    live = LiveTiles.of(jnp.any(_joined(calls, size), 1))
    present = tuple(jnp.any(call).astype(jnp.int32) for call in calls)
    return cls(calls=calls, size=size, live=live, present=present)

  def joined(
    self, arrays: Sequence[Shaped[Array, "_ _ ..."]]
  ) -> Shaped[Array, "tiles size ..."]:
    """Tiles of each call's array [B, T, ...]."""
    return _joined(arrays, self.size)

  def take(
    self, x: Shaped[Array, "tiles size ..."], call: int
  ) -> Shaped[Array, "B T ..."]:
    """A call's array of an array of tiles; zeros without tokens."""
    holds = self.calls[call]
    rows, start = x.reshape(-1, *x.shape[2:]), self._first_row(call)
    rows = lax.slice_in_dim(rows, start, start + holds.size)
    part = rows.reshape(*holds.shape, *x.shape[2:])
    holds = holds.reshape(*holds.shape, *(1,) * (x.ndim - 2))
    return jnp.where(holds, part, jnp.zeros((), x.dtype))

  def put(
    self,
    x: Shaped[Array, "tiles size ..."],
    call: int,
    new: Shaped[Array, "B T ..."],
  ) -> Shaped[Array, "tiles size ..."]:
    """An array of tiles with those of a call replaced."""
    rows, start = x.reshape(-1, *x.shape[2:]), self._first_row(call)
    new = new.reshape(-1, *x.shape[2:]).astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(rows, new, start, 0).reshape(x.shape)

  def _first_row(self, call: int) -> int:
    """Number of the row of a call's first token."""
    return sum(-(-x.size // self.size) * self.size for x in self.calls[:call])

  def map_tiles(
    self,
    f: Callable[..., Any],
    *arrays: Shaped[Array, "tiles size ..."],
  ) -> Any:
    """`f` of each tile of some arrays that holds tokens, one after another.

    Args:
      f: Function of arrays [1, size, ...] that acts on each token, and
        multiplies no large weights.
      *arrays: Arrays of tiles.
    """
    take = lambda x, n: lax.dynamic_slice_in_dim(x, n, 1, 0)
    order = jnp.asarray(self.live.order)

    def step(n: Index, results: Any) -> Any:
      tile = order[n]
      put = lambda x, new: lax.dynamic_update_slice_in_dim(x, new, tile, 0)
      return jax.tree.map(put, results, f(*(take(x, tile) for x in arrays)))

    empty = jax.tree.map(
      lambda x: lax.empty((order.size, *x.shape[1:]), x.dtype),
      jax.eval_shape(lambda: f(*(take(x, 0) for x in arrays))),
    )
    with jax.named_scope("row_tiles"):
      return loop(jnp.asarray(self.live.count), step, empty)

  def product(
    self,
    x: Float[Array, "tiles size *in"],
    weight: LayerArray | Float[Array, ...],
    contracted: int,
  ) -> Float[Array, "tiles size O"]:
    """Product of the tokens with a weight [*in, *out], in one axis.

    Args:
      x: Tokens, of the weight's dtype.
      weight: Weight of a layer.
      contracted: Number of axes in `in`.
    """
    stacked, index = _in_place(weight)
    shape = stacked.shape[len(index) :]
    # Inputs in one axis are the same memory, unlike outputs.
    lead, inner = stacked.shape[: len(index)], math.prod(shape[:contracted])
    stacked = stacked.reshape(*lead, inner, *shape[contracted:])
    rows = x.reshape(*x.shape[:2], -1)
    return flat_product(rows, stacked, self.live, index)

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


def by_tile(f: Callable[..., Any], *arrays: PyTree) -> Any:
  """`f` of trees of arrays [B, T, ...]; of rows in tiles see `RowTiles`."""
  tiles = current_row_tiles()
  return f(*arrays) if tiles is None else tiles.map_tiles(f, *arrays)
