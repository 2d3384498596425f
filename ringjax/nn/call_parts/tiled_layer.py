"""A layer over the tiles of a call, one after another.

Guarantees: a tile sees the keys and the states that the tiles of its row before
it have written, as in one call over all tokens.
Cost: the layer once for each tile that holds tokens, and once or not at all for
a call that may compute nothing; forward only, as a loop whose length is data
has no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ringjax.kv.base import CallCache
from ringjax.nn.tokens import Tokens
from ringjax.nn.weights.adapter_rows import adapter_rows
from ringjax.ops.attention.blockwise import loop
from ringjax.typing import Index


def over_tiles(
  layer: Callable[..., tuple[Any, tuple[Any, ...]]],
  x: Float[Array, "B T *D"],
  tokens: Tokens,
  parts: tuple[Any, ...],
  cache: CallCache,
) -> tuple[Float[Array, "B T *D"], tuple[Any, ...]]:
  """Output of a layer, and its parts of the cache with the call's tokens.

  Args:
    layer: Function of (x, tokens, parts) of a batch of one row of a tile's
      tokens that returns its output and its parts.
    x: Input of the layer; tokens without a tile keep it.
    tokens: Coordinates and rotations of the call's tokens.
    parts: Parts of the layer's mixers in the cache.
    cache: Cache of the call, which has tiles.
  """

  def step(level: int, n: Index, carry: Any) -> Any:
    x, slots = carry
    tile = cache.tile(level, n)
    row_parts = _with_slots(parts, slots)
    tile_tokens = tokens.of_tile(tile.take, tile.take_row, tile.is_filled)
    with adapter_rows(tile_tokens.adapters):
      y, new = layer(
        tile.take(x),
        tile_tokens,
        tuple(part.of_tile(tile) for part in row_parts),
      )
    slots = tuple(
      part.with_tile(tile, new_part).slots
      for part, new_part in zip(row_parts, new, strict=True)
    )
    return tile.put(x, y), slots

  carry: Any = x, tuple(part.slots for part in parts)
  # Larger tiles are of later positions.
  for level, tiles in enumerate(cache.tiles):
    count = jnp.asarray(tiles.count)
    carry = loop(count, functools.partial(step, level), carry)
  x, slots = carry
  return x, _with_slots(parts, slots)


def where_present(
  layer: Callable[..., tuple[Any, tuple[Any, ...]]],
  x: Float[Array, "B T *D"],
  tokens: Tokens,
  parts: tuple[Any, ...],
  present: Int[Array, ""],
) -> tuple[Float[Array, "B T *D"], tuple[Any, ...]]:
  """Output of a layer, and its parts of the cache, if the call computes.

  Args:
    layer: Function of (x, tokens, parts) that returns its output and its parts.
    x: Input of the layer, which is returned if the call does not compute.
    tokens: Coordinates and rotations of the call's tokens.
    parts: Parts of the layer's mixers in the cache.
    present: 1 if the call computes, else 0.
  """

  def step(_: Index, carry: Any) -> Any:
    x, slots = carry
    with adapter_rows(tokens.adapters):
      y, new = layer(x, tokens, _with_slots(parts, slots))
    return y.astype(x.dtype), tuple(part.slots for part in new)

  # A loop writes to the arrays in place, of which a branch would make copies.
  x, slots = loop(present, step, (x, tuple(part.slots for part in parts)))
  return x, _with_slots(parts, slots)


def _with_slots(
  parts: tuple[Any, ...], slots: tuple[Any, ...]
) -> tuple[Any, ...]:
  """Parts of a layer's mixers in the cache, with these arrays."""
  return tuple(
    dataclasses.replace(part, slots=part_slots)
    for part, part_slots in zip(parts, slots, strict=True)
  )
