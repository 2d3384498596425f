"""Counts of the tiles that each device computes in each hop of the ring.

Guarantees: equals what the loops of `Ring(Blockwise(q_block, k_block))` run,
because `tile_kinds` decides here as there, on the same coordinates. Nothing is
modelled: a layout's balance is counted, not estimated.

Hop h brings shard i the keys of shard (i - h) mod R, its own first. Hops that a
mask's reach does not need are skipped by the ring; here they are rows of zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ringjax.checks import positive_int
from ringjax.ops.attention.blockwise import Blockwise, tile_kinds
from ringjax.ops.mask import Coords, Mask
from ringjax.parallel.layout import Layout


def tile_schedule(
  layout: Layout,
  mask: Mask,
  shards: int,
  length: int,
  q_block: int | None = None,
  k_block: int | None = None,
) -> Int[np.ndarray, "hops R rows columns"]:
  """Classify every tile: int8 [hops, shards, T/q_block, S/k_block].

  0: no pair is allowed, the tile is skipped; 1: some are, a masked tile; 2: all
  are, a full tile, computed without the mask. T and S are local lengths.

  Args:
    layout: Order of the tokens on the shards.
    mask: Mask over coordinates, e.g. `Causal()`.
    shards: Number of devices of the ring, R.
    length: Tokens of the whole sequence.
    q_block: Queries of a tile; as in `Blockwise`, None chooses by the local
      length, and a block that does not divide it is evened out.
    k_block: Keys of a tile.
  """
  positive_int("shards", shards)
  positive_int("length", length)
  local = layout.local_length(length, shards)
  blocks = Blockwise(q_block, k_block).blocks(local, local)
  natural = [layout.positions(i, shards, local) for i in range(shards)]
  pos = np.stack([np.asarray(p) for p in natural])
  seg = (pos < length).astype(np.int32)
  q, k = (_padded(pos, seg, n) for n in blocks)
  kinds = np.asarray(_all_kinds(mask, q, k, blocks))
  hop, device = np.ogrid[:shards, :shards]
  return kinds[device, (device - hop) % shards]


def tile_counts(
  layout: Layout,
  mask: Mask,
  shards: int,
  length: int,
  q_block: int | None = None,
  k_block: int | None = None,
) -> Int[np.ndarray, "hops R"]:
  """Count the tiles of each shard in each hop: int64 [hops, shards]."""
  kinds = tile_schedule(layout, mask, shards, length, q_block, k_block)
  return np.count_nonzero(kinds, axis=(2, 3))


def busy(counts: np.ndarray) -> float:
  """Share of the devices' time that is spent on tiles.

  A hop lasts as long as its slowest device takes.

  Args:
    counts: Tile counts [hops, shards], from `tile_counts`.
  """
  return float(counts.sum() / (counts.shape[1] * counts.max(axis=1).sum()))


def _padded(pos: np.ndarray, seg: np.ndarray, block: int) -> Coords:
  # Slots that fill up the last tile are empty, as in the loops.
  extra = ((0, 0), (0, -pos.shape[1] % block))
  return Coords(*(jnp.asarray(np.pad(x, extra)) for x in (pos, seg)))


@functools.partial(jax.jit, static_argnums=3)
def _all_kinds(
  mask: Mask, q: Coords, k: Coords, blocks: tuple[int, int]
) -> Int[Array, "_ _ _ _"]:
  """Kinds of tiles, [q shard, k shard, T/q_block, S/k_block]."""

  def kinds(q: Coords, k: Coords) -> jax.Array:
    with_batch = lambda at: Coords(at.pos[None], at.seg[None])
    return tile_kinds(mask, with_batch(q), with_batch(k), *blocks)

  return jax.vmap(jax.vmap(kinds, (None, 0)), (0, None))(q, k)
