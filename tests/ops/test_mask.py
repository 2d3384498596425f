"""Masks at the ends of int32, against Python's integers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.ops import mask as masks
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.mask import (
  Behind,
  Beyond,
  BlockCausal,
  Causal,
  Chunked,
  ChunksBack,
  Coords,
  Prefix,
  Since,
  Window,
  extent,
)

FIRST, LAST = -(2**31), 2**31 - 1
PLACES = (FIRST, FIRST + 1, -(2**30) - 7, -1, 0, 1, 2**30 + 7, LAST - 1, LAST)


def window(size, ahead=None):
  ahead = size - 1 if ahead is None else ahead
  return Window(size, ahead), lambda q, k: -ahead <= q - k < size


SEES = {
  "causal": (Causal(), lambda q, k: k <= q),
  "window": window(2),
  "behind": window(4, 0),
  "ahead": window(1, 3),
  "wide": window(2**31 - 1),
  "wider": window(2**31, 2**31 - 1),
  "widest": window(2**32 - 1),
  "everything": window(2**70),
  "chunks": (Chunked(3), lambda q, k: q // 3 == k // 3),
  "wide chunks": (Chunked(2**40), lambda q, k: q // 2**40 == k // 2**40),
  "blocks": (BlockCausal(5), lambda q, k: k // 5 <= q // 5),
  "wide blocks": (BlockCausal(2**31), lambda q, k: k // 2**31 <= q // 2**31),
  "chunks before": (
    ChunksBack(3, 1, 2),
    lambda q, k: 1 <= q // 3 - k // 3 <= 2,
  ),
  "own chunk": (ChunksBack(2, 0, 0), lambda q, k: q // 2 == k // 2),
  "all chunks before": (ChunksBack(5, 2), lambda q, k: q // 5 - k // 5 >= 2),
  "beyond": (Beyond(3), lambda q, k: q - k >= 3),
  "far beyond": (Beyond(2**33), lambda q, k: q - k >= 2**33),
  "one behind": (Behind(1), lambda q, k: q - k == 1),
  "far behind": (Behind(2**31 - 2), lambda q, k: q - k == 2**31 - 2),
  "since": (Since(2**30), lambda q, k: k >= 2**30),
  "prefix": (Prefix(LAST), lambda q, k: k < LAST),
}


def at(*places):
  pos = jnp.asarray(places, jnp.int32)
  return Coords(pos, jnp.ones_like(pos))


@pytest.mark.parametrize("name", SEES)
def test_no_difference_wraps_around(name):
  mask, sees = SEES[name]
  q = Coords(*(x[:, None] for x in at(*PLACES)))
  k = Coords(*(x[None] for x in at(*PLACES)))
  want = [[sees(a, b) for b in PLACES] for a in PLACES]
  np.testing.assert_array_equal(mask.allows(q, k), want)


@pytest.mark.parametrize("name", SEES)
@pytest.mark.parametrize("padded", [False, True])
def test_bounds_hold_at_the_ends(name, padded):
  """Of tiles of two tokens that are next to each other or far apart."""
  mask, sees = SEES[name]
  tiles = [(a, b) for n, a in enumerate(PLACES) for b in PLACES[n:]]
  both = at(*tiles)
  if padded:
    both = Coords(*(jnp.pad(x, ((0, 0), (0, 1))) for x in both))
  q, k = (
    extent(both)._replace(
      **{f: x[index] for f, x in extent(both)._asdict().items()}
    )
    for index in np.indices((len(tiles), len(tiles)))
  )
  some, every = (np.asarray(x) for x in mask.bound(q, k))
  for i, rows in enumerate(tiles):
    for j, columns in enumerate(tiles):
      pairs = [sees(a, b) for a in rows for b in columns]
      assert some[i, j] or not any(pairs), (rows, columns)
      assert all(pairs) or not every[i, j], (rows, columns)
  near, far = tiles.index((0, 0)), tiles.index((FIRST, FIRST))
  if name == "window" and not padded:
    assert not some[near, far] and every[near, near]


def test_distances_of_any_two_positions():
  q, k = np.meshgrid(PLACES, PLACES)
  got = masks.distance(jnp.asarray(q, jnp.int32), jnp.asarray(k, jnp.int32))
  np.testing.assert_array_equal(got, np.abs(q - k).astype(np.float32))


@pytest.mark.parametrize(
  "local",
  [rj.Dense(), rj.Blockwise(8, 8), FlashTPU(8, 8, interpret=True)],
  ids=repr,
)
def test_attention_from_one_end_to_the_other(local):
  """Tokens at both ends of int32 are not neighbours."""
  rng = np.random.default_rng(0)
  q = jnp.asarray(rng.normal(size=(1, 16, 1, 8)), jnp.float32)
  pos = np.arange(16, dtype=np.int32)
  pos = np.where(pos < 8, FIRST + pos, LAST - 15 + pos).astype(np.int32)
  options = dict(
    mask=Window(4), strategy=rj.Ring(local), alibi_slopes=jnp.array([0.3])
  )
  got = rj.dot_product_attention(
    q, q, q, q_positions=pos, kv_positions=pos, **options
  )
  halves = [
    rj.dot_product_attention(x, x, x, **options) for x in (q[:, :8], q[:, 8:])
  ]
  np.testing.assert_allclose(got, jnp.concatenate(halves, 1), atol=1e-5)
