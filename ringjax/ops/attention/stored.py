"""Keys of one layer of a stack, and a few queries that visit them there.

Law: `visit` equals `reference`; forward only.
Cost: it reads the tiles that count, once: a tile is cut out of the stack at
(layer, tile), and nothing else that is as long as the keys is made. Scores
are computed keys first, so that no key is transposed.
Memory: one tile of keys and one of values.

For many queries it is better to bring a layer's keys into another order once,
as `Blockwise` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringjax.ops.attention.blockwise import (
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  product,
  tile_kinds,
  tile_lists,
)
from ringjax.ops.attention.scores import Context, Scores, Terms, Tile
from ringjax.ops.mask import Coords
from ringjax.ops.softmax import Partial, wide_dtype

# Of the keys of a tile. On a CPU they and the values stay in a core's cache
# between being cut out and being multiplied; elsewhere a step of a loop costs
# as much as reading some megabytes.
TILE_BYTES = {"cpu": 1 << 20, "tpu": 1 << 25, "gpu": 1 << 25}
_LEAST = 128


class Stored(NamedTuple):
  """One layer's keys and values, where they lie.

  Fields:
    k: [L, B, K, S, H].
    v: [L, B, K, S, J].
    at: coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: int32 [], which of the L.
  """

  k: jax.Array
  v: jax.Array
  at: Coords
  layer: Any

  def cut(self, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, K, size, ...] of the slots from `start` on."""
    zero = jnp.int32(0)
    corner = (jnp.asarray(self.layer, jnp.int32), zero, zero, start, zero)

    def one(x: jax.Array) -> jax.Array:
      _, b, heads, _, dim = x.shape
      return lax.dynamic_slice(x, corner, (1, b, heads, size, dim))[0]

    return one(self.k), one(self.v)

  def whole(self) -> tuple[jax.Array, jax.Array]:
    """A copy of the layer's keys and values."""
    return self.cut(jnp.int32(0), self.k.shape[3])

  def block(self, platform: str = "cpu") -> int:
    """Slots of a tile."""
    _, b, heads, length, dim = self.k.shape
    slot = b * heads * dim * self.k.dtype.itemsize
    many = TILE_BYTES.get(platform, TILE_BYTES["cpu"]) // slot
    return min(length, max(_LEAST, many // _LEAST * _LEAST))


def visit(
  scores: Scores,
  q: jax.Array,
  keys: Stored,
  terms: Terms,
  context: Context,
  platform: str = "cpu",
) -> Partial:
  """The partial of queries [B, K, G, T, H] over the keys of `context.k`."""
  rows, length, block = q.shape[3], keys.k.shape[3], keys.block(platform)
  context = context._replace(k=tiled(context.k, block))
  kinds = tile_kinds(context.mask, context.q, context.k, rows, block)
  lists = tile_lists(kinds, masked=False)

  def step(masked: bool, tiles: jax.Array, n: Any, one: Partial) -> Partial:
    first = tiles[0, n] * block
    k, v = keys.cut(jnp.minimum(first, length - block), block)
    s = product("bkth,bkgqh->bktgq", k.astype(q.dtype), q)
    return fold_tile(
      scores,
      jnp.transpose(s, (0, 1, 3, 4, 2)),
      v,
      finite_flag(v, s.dtype) if masked else None,
      terms,
      context,
      Tile(0, first, rows, block, 0),
      context.q,
      cut_coords(context.k, first, block),
      one,
    )

  wide = wide_dtype(q.dtype)
  start = Partial.empty(q.shape[:4], keys.v.shape[-1], wide, (q, keys))
  some = loop(
    lists.wholes[0], lambda n, c: step(False, lists.whole, n, c), start
  )
  return loop(lists.parts[0], lambda n, c: step(True, lists.part, n, c), some)


def tiled(at: Coords, block: int) -> Coords:
  """Coordinates of whole tiles, one behind another.

  The last tile ends with the last slot; what it shares with the one before is
  nothing in it.
  """
  length = at.pos.shape[1]
  over = -length % block
  if not over:
    return at
  cut = length // block * block
  both = lambda x, last: jnp.concatenate([x[:, :cut], last], 1)
  seg = at.seg[:, length - block :].at[:, :over].set(0)
  return Coords(both(at.pos, at.pos[:, length - block :]), both(at.seg, seg))
