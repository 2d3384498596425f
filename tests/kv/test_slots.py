"""Writing tokens into slots: the memory that it takes, and row after row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.kv import CacheConfig
from ringjax.kv.cache import KVCache
from ringjax.kv.codecs import Codec, Integers
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.storage.master_slots import MasterSlots
from ringjax.kv.storage.slots import REPLICATED, SHARDED, ContiguousSlots
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from tests.helpers import as_tpu

EIGHT = Codec(keys=Integers(bits=8), values=Integers(bits=8))
L, B, K, S, H = 16, 5, 2, 40, 16


def test_narrow_keys_are_written_without_a_wide_copy_of_all_layers():
  before = np.array([[0], [7], [39], [12], [5]], np.int32)
  used = before + np.array([[1], [1], [1], [0], [1]], np.int32)
  at = Coords(*[jnp.zeros((B, S), jnp.int32)] * 2)
  slots = ContiguousSlots(
    at=at, used=jnp.asarray(used), before=jnp.asarray(before), mode=SHARDED
  )

  def step(old, new):
    write = lambda x, n: (slots.write(x, new, n), None)
    return lax.scan(write, old, jnp.arange(L, dtype=jnp.int32))[0]

  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  old, new = draw(L, B, K, S, H), draw(B, K, 1, H)
  old, new = (jnp.asarray(x, jnp.bfloat16) for x in (old, new))
  made = jax.jit(step, donate_argnums=0).lower(old, new).compile()
  want = np.array(old)
  for row in range(B):
    if used[row, 0] > before[row, 0]:
      want[:, row, :, before[row, 0]] = np.asarray(new)[row, :, 0]
  # Of one layer, in float32, and of nothing that grows with the layers.
  assert made.memory_analysis().temp_size_in_bytes < old.nbytes
  np.testing.assert_array_equal(np.asarray(made(old, new)), want)


@pytest.mark.long
@pytest.mark.parametrize("codec", [None, EIGHT])
@pytest.mark.parametrize("reach", [None, 6])
def test_row_after_row_is_all_rows_at_once(monkeypatch, reach, codec):
  """A TPU writes them so: numbers and codes, into slots and ring buffers."""
  shape = LayerCacheSpec(layers=2, heads=2, key=8, value=8, reach=reach)
  empty = KVCache.create(
    (shape,),
    3,
    64,
    jnp.float32,
    kind=CacheConfig(windowed=True, slack=8, codec=codec),
    platform="tpu",
  )
  assert bool(empty.rings) == (reach is not None)
  rng = np.random.default_rng(0)
  calls = []
  for first, count in ((0, 9), (9, 1), (10, 3), (13, 1)):
    pos = np.tile(np.arange(first, first + count, dtype=np.int32), (3, 1))
    # The second row has one token, the third none in some calls.
    seg = np.arange(count) < np.array([[count], [1], [count // 9]])
    keys = rng.standard_normal((2, 3, 2, count, 8)).astype(np.float32)
    calls.append((Coords(pos, seg.astype(np.int32)), *keys))

  def filled(calls):
    cache = empty
    for at, k, v in calls:
      cache = cache.allocate(at, replicated=True, sees=True)
      (slots,) = cache.slots
      for n in range(2):
        part = cache.layer(0, slots, jnp.int32(n))
        slots = part.append(k + n, v, at, Rotation()).slots
      cache = cache.updated((slots,))
    return cache

  want = jax.jit(lambda x: filled(x))(calls)
  as_tpu(monkeypatch)
  got = jax.jit(lambda x: filled(x))(calls)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("sharded_by", ["data", "model"])
@pytest.mark.parametrize("masters", [2, 4])
def test_masters_write_beside_another_axis(sharded_by, masters):
  """Another axis shards rows or heads; tokens are in their rows and slots."""
  axis_size = 8 // masters
  mesh = jax.make_mesh(
    (axis_size, masters), (sharded_by, "seq"), axis_types=(AxisType.Auto,) * 2
  )
  batch, heads, slots = 4, 4, 4 * masters
  rows = sharded_by if sharded_by == "data" else None
  head_axis = sharded_by if sharded_by == "model" else None
  put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
  empty = np.zeros((batch, slots), np.int32)
  table = MasterSlots(
    at=Coords(put(empty, rows, "seq"), put(empty, rows, "seq")),
    used=put(np.ones((batch, masters), np.int32)),
    before=put(np.ones((batch, masters), np.int32)),
    mesh=mesh,
    axis="seq",
  )
  pos = np.arange(batch, dtype=np.int32)[:, None] + 10
  seg = np.array([[1], [1], [0], [1]], np.int32)
  token = np.arange(batch * heads, dtype=np.float32) + 1
  token = token.reshape(batch, heads, 1, 1)

  @jax.jit
  def write(table, k, pos, seg, token):
    table = table.allocate(Coords(pos, seg), REPLICATED)
    return table, table.write(k, token, jnp.int32(1))

  k = put(
    np.zeros((2, batch, heads, slots, 1), np.float32),
    None, rows, head_axis, "seq",
  )  # fmt: skip
  call = [put(x, "seq") for x in (pos, seg, token)]
  table, k = write(table, k, *call)
  want = np.zeros((2, batch, heads, slots, 1), np.float32)
  want_pos = np.zeros((batch, slots), np.int32)
  for row in range(batch):
    # The row's master has one token already.
    slot = row // (batch // masters) * (slots // masters) + 1
    if seg[row, 0]:
      want[1, row, :, slot] = token[row, :, 0]
      want_pos[row, slot] = pos[row, 0]
  np.testing.assert_array_equal(k, want)
  np.testing.assert_array_equal(table.at.pos, want_pos)
