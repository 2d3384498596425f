"""Pages that rows share: what calls write there, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.kv.cache import LayerCacheSpec
from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.page_pool import PagePool
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from tests.helpers import make_mesh


@pytest.mark.parametrize(
  ("devices", "kind"),
  [
    (4, "int4"),
    pytest.param(1, "windowed", marks=pytest.mark.long),
    pytest.param(4, "unrotated", marks=pytest.mark.long),
  ],
)
def test_the_path_of_a_tree_is_in_the_pages_as_a_chain(devices, kind):
  """Bit for bit: what the pages hold behind `moved`."""
  mesh = None if devices == 1 else make_mesh(devices, "auto")
  rng, page, width = np.random.default_rng(devices), 16, 7
  parents = np.array([[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 1, 0, 4, 3]])
  paths = (0, 2, 4, 6), (0, 1, 3, 6)
  # The rows' ends: within a page, and before the end of one.
  start = np.array([21, 29])
  shape = LayerCacheSpec(layers=2, heads=2, key=16, value=16)
  pool = PagePool.create(
    (shape,),
    rows=2,
    pages=lambda reach: 8,
    page=page,
    dtype=np.float32,
    kind=cache_kind(kind),
    mesh=mesh,
    axis=None if mesh is None else "seq",
  )
  # Page n of a row on shard n modulo their number.
  table = np.arange(8).reshape(2, 4)
  if devices > 1:
    table = np.array([[[0]] * 4, [[1]] * 4])
  tables = (jnp.asarray(table.reshape(2, devices, -1), jnp.int32),)
  k, v = rng.standard_normal((2, 2, 2, width, 16)).astype(np.float32)
  rows = jnp.arange(2, dtype=jnp.int32)
  int32 = lambda x: jnp.asarray(x, jnp.int32)

  @functools.partial(jax.jit, static_argnums=2)
  def written(pool, parents, which):
    """The pool with tokens of the rows, one behind another or as a tree."""
    take = lambda x: jnp.stack([x[n][:, list(which[n])] for n in (0, 1)])
    count = len(which[0])
    pos = start[:, None] + np.arange(count)
    at = Coords(int32(pos), int32(pos) * 0 + 1)
    held = pool.call(
      tables, int32(start + count), rows, rows < 0, None, parents
    ).allocate(at, replicated=True, sees=True)
    slots = held.slots[0]
    for layer in range(2):
      one = held.layer(0, slots, jnp.int32(layer))
      one = one.append(take(k) + layer, take(v), at, Rotation())
      slots = one.slots
    return held.updated((slots,))

  tree = written(pool, int32(parents), (tuple(range(width)),) * 2)
  chain = written(pool, None, paths)
  source = start[:, None] + np.array(paths)
  target = start[:, None] + np.arange(4)
  # The roots stay.
  target[:, 0] = -1
  tree = jax.jit(PagePool.moved)(tree, tables, int32(source), int32(target))
  for mine, theirs in zip(tree.slots[0], chain.slots[0], strict=True):
    for row in range(2):
      for pos in range(start[row], start[row] + 4):
        at = table.reshape(2, devices, -1)
        number = pos // page
        local = at[row, number % devices, number // devices]
        whole = number % devices * (8 // devices) + local
        a, b = (np.asarray(x)[:, whole, :, pos % page] for x in (mine, theirs))
        np.testing.assert_array_equal(a, b)
