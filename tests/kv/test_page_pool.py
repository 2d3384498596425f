"""Pages that rows share: what calls write there, bit for bit."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.storage.page_pool import PagePool
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

  def noise(like):
    """What earlier rows left in the pages."""
    one = lambda x: jax.device_put(
      rng.integers(0, 99, x.shape).astype(x.dtype), x.sharding
    )
    return jax.tree.map(one, like)

  pool = PagePool.create(
    (shape,),
    rows=2,
    fill=noise,
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


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [1, 4])
def test_tokens_are_in_their_slots_and_no_other_is_touched(devices, dtype):
  """Of calls whose rows have several pieces, in one page too, and padding."""
  mesh = None if devices == 1 else make_mesh(devices, "auto")
  page, many, rng = 16, 12, np.random.default_rng(devices)
  pool = PagePool.create(
    (LayerCacheSpec(layers=3, heads=2, key=8, value=4),),
    rows=4,
    pages=lambda reach: many,
    page=page,
    dtype=dtype,
    kind=cache_kind("dense"),
    mesh=mesh,
    axis=None if mesh is None else "seq",
  )
  local = many // devices
  # Three rows of four pages, in any order; page n on shard n modulo them.
  free = [list(rng.permutation(local)) for _ in range(devices)]
  of_row = [[free[n % devices].pop() for n in range(4)] for _ in range(3)]

  @jax.jit
  def append(pool, table, pos, seg, k, v):
    at, ends = Coords(pos, seg), jnp.max(pos, 1) + 1
    rows = jnp.arange(pos.shape[0], dtype=jnp.int32)
    held = pool.call((table,), ends, rows, rows < 0)
    held = held.allocate(at, replicated=True, sees=True)
    one = held.layer(0, held.slots[0], jnp.int32(1))
    return held.updated((one.append(k, v, at, Rotation()).slots,))

  want = [np.zeros((3, many, 2, page, n), np.float32) for n in (8, 4)]
  # (row, first slot, tokens) of the pieces of each call.
  for pieces in (
    [(0, 0, 21), (1, 0, 5)],
    # Two pieces of a row that meet in a page, and two more in the same page.
    [(0, 21, 10), (0, 31, 3), (1, 5, 4), (1, 9, 7), (2, 0, 24)],
    [(2, 24, 1), (0, 34, 1), (1, 16, 0)],
    # From the last slot of a page to the first one of the page but one after.
    [(1, 31, page + 2)],
  ):
    padding = len(pieces) > 1
    count = max(size for _, _, size in pieces) + padding
    table = np.full((len(pieces), devices, 4 // min(devices, 4)), -1)
    pos, seg = (np.zeros((len(pieces), count), int) for _ in "ab")
    k = rng.integers(-9, 9, (len(pieces), 2, count, 8)).astype(np.float32)
    v = rng.integers(-9, 9, (len(pieces), 2, count, 4)).astype(np.float32)
    for n, (row, first, size) in enumerate(pieces):
      for number, one in enumerate(of_row[row]):
        table[n, number % devices, number // devices] = one
      pos[n] = first + np.arange(count)
      seg[n, :size] = 1
      for t in range(size):
        number, spot = divmod(first + t, page)
        where = number % devices * local + of_row[row][number]
        for array, new in zip(want, (k, v), strict=True):
          array[1, where, :, spot] = new[n, :, t]
    int32 = lambda x: jnp.asarray(x, jnp.int32)
    new = [jnp.asarray(x, dtype) for x in (k, v)]
    pool = append(pool, *map(int32, (table, pos, seg)), *new)
    for mine, theirs in zip(pool.slots[0], want, strict=True):
      np.testing.assert_array_equal(np.asarray(mine, np.float32), theirs)


@pytest.mark.long
def test_pages_are_the_same_however_layers_are_grouped():
  """Kinds of equal layers are read as one array, in the order of layers."""
  layer = LayerCacheSpec(layers=1, heads=2, key=8, value=4)
  pool = lambda *groups: PagePool.create(
    tuple(
      dataclasses.replace(layer, layers=len(which), which=which)
      for which in groups
    ),
    rows=2,
    pages=lambda reach: 4,
    page=16,
    dtype=np.float32,
    kind=cache_kind("dense"),
  )
  loop = pool((0, 1, 2, 3))
  pages = jnp.int32([[1, 3]])
  keys, values = loop.read_pages(0, pages)
  draw = np.random.default_rng(0).standard_normal
  held = tuple(jnp.float32(draw(x.shape)) for x in (keys, values))
  for groups in (((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), ((0, 2), (1, 3))):
    empty = pool(*groups)
    assert empty.page_shapes(0) == loop.page_shapes(0)
    assert empty.page_axes(0) == loop.page_axes(0)
    assert empty.layers(0) == (0, 1, 2, 3)
    filled = empty.write_pages(0, pages, held)
    for which, slots in zip(groups, filled.slots, strict=True):
      for x, want in zip(slots, held, strict=True):
        numbers = np.array(which)
        np.testing.assert_array_equal(x[:, np.array([1, 3])], want[numbers])
    for layers in (None, (0, 2), (1, 4), (3, 4)):
      first, end = layers or (0, 4)
      read = filled.read_pages(0, pages, layers)
      for x, want in zip(read, held, strict=True):
        np.testing.assert_array_equal(x, want[first:end])
      cuts = filled.layer_ranges(0, layers)
      assert cuts == (range(first, end), range(first, end))
