"""The plain cache: every token in one slot, level over the shards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import OptionError, ShapeError
from ringjax.kv.base import CallCache, LayerCache
from ringjax.kv.cache import KVCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.state import StateShape
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from tests.helpers import make_mesh

KINDS = (
  LayerCacheSpec(layers=2, heads=2, key=4, value=6),
  LayerCacheSpec(layers=1, heads=1, key=8, value=0),
)
B = 2


def create(capacity, shards=1):
  mesh = make_mesh(shards, "auto") if shards > 1 else None
  axis = None if mesh is None else "seq"
  return KVCache.create(KINDS, B, capacity, jnp.float32, mesh=mesh, axis=axis)


def tokens(first, count):
  """Coordinates, keys and values that say whose they are."""
  pos = jnp.tile(first + jnp.arange(count, dtype=jnp.int32), (B, 1))
  whose = 1000 * jnp.arange(B, dtype=jnp.int32)[:, None]
  number = (pos + whose).astype(jnp.float32)[:, None, :, None]
  at = Coords(pos, jnp.ones_like(pos))

  def kv(shape, layer):
    k = jnp.broadcast_to(number, (B, shape.heads, count, shape.key))
    v = jnp.broadcast_to(-number, (B, shape.heads, count, shape.value))
    return k + jnp.float32(layer / 4), v

  return at, kv


@functools.partial(jax.jit, static_argnums=(2, 3))
def append(cache, first, count, replicated):
  at, kv = tokens(first, count)
  assert isinstance(cache, CallCache)
  cache = cache.allocate(at, replicated=replicated, sees=True)
  slots = list(cache.slots)
  for kind, shape in enumerate(KINDS):
    for index in range(shape.layers):
      layer = cache.layer(kind, slots[kind], jnp.int32(index))
      assert isinstance(layer, LayerCache)
      slots[kind] = layer.append(*kv(shape, index), at, Rotation()).slots
  return cache.updated(tuple(slots))


def check(cache, total):
  """Every token lies in one slot, with its keys and values, once."""
  pos, seg = np.asarray(cache.at.pos), np.asarray(cache.at.seg)
  for b in range(B):
    used = np.flatnonzero(seg[b])
    assert sorted(pos[b, used].tolist()) == list(range(total))
    for shape, slots in zip(KINDS, cache.slots, strict=True):
      for layer in range(shape.layers):
        want = pos[b, used] + 1000.0 * b
        k = np.asarray(slots.k)[layer, b][:, used]
        v = np.asarray(slots.v)[layer, b][:, used]
        np.testing.assert_array_equal(
          k, np.broadcast_to(want[None, :, None] + layer / 4, k.shape)
        )
        np.testing.assert_array_equal(
          v, np.broadcast_to(-want[None, :, None], v.shape)
        )


@pytest.mark.long
@settings(max_examples=8)
@given(
  st.sampled_from([1, 4]),
  st.lists(
    st.tuples(st.booleans(), st.sampled_from([1, 3])), min_size=1, max_size=9
  ),
)
def test_every_token_lies_in_one_slot(shards, calls):
  """Sharded chunks and single tokens, in any order."""
  cache, total = create(40 * shards, shards), 0
  for replicated, count in calls:
    count = count if replicated else count * shards
    cache = append(cache, total, count, replicated)
    total += count
  check(cache, total)


def test_what_is_generated_goes_around():
  """No shard has two slots more than another."""
  cache = append(create(64, 4), 0, 8, replicated=False)
  for n in range(9):
    cache = append(cache, 8 + n, 1, replicated=True)
    used = np.asarray(cache.at.seg).reshape(B, 4, -1).sum(-1)
    assert used.max() - used.min() <= 1 and used.sum() == B * (9 + n)


def used(cache):
  return cache.capacity // cache.shards - cache.free()


def test_a_chunk_behind_a_token_costs_no_slot():
  cache = append(create(64, 4), 0, 1, replicated=True)
  cache = append(cache, 1, 8, replicated=False)
  assert used(cache)[0].tolist() == [3, 2, 2, 2]
  # What comes next makes the shards level.
  cache = append(cache, 9, 3, replicated=True)
  assert used(cache)[0].tolist() == [3, 3, 3, 3]
  check(cache, 12)


@pytest.mark.parametrize("shards", [1, 4])
def test_what_is_cut_off_is_free_again(shards):
  cache = append(create(10 * shards, shards), 0, 2 * shards, replicated=False)
  total = 2 * shards + 6
  for n in range(2 * shards, total):
    cache = append(cache, n, 1, replicated=True)
  assert cache.length.tolist() == [total] * B
  cache = cache.truncate(total - 3)
  check(cache, total - 3)
  assert used(cache).sum(1).tolist() == [total - 3] * B
  # What comes next is where the tokens that were cut off were.
  before = [np.asarray(x) for x in jax.tree.leaves(cache.held)]
  cache = append(cache, total - 3, 1, replicated=True).truncate(total - 3)
  assert used(cache).sum(1).tolist() == [total - 3] * B
  del before
  cache = append(cache, total - 3, 1, replicated=True)
  check(cache, total - 2)
  cache = cache.truncate(jnp.array([shards, 0]))
  assert cache.length.tolist() == [shards, 0]
  assert used(cache).sum(1).tolist() == [shards, 0]


def test_examples_are_taken_and_stay_where_they_lie():
  cache = append(create(16, 4), 0, 8, replicated=False)
  cache = cache.truncate(jnp.array([8, 5]))
  for examples in ([1, 0], [1], [0, 1, 1]):
    some = cache.take(jnp.array(examples))
    assert some.length.tolist() == [(8, 5)[b] for b in examples]
    for x, y in zip(
      jax.tree.leaves(some.slots), jax.tree.leaves(cache.slots), strict=True
    ):
      np.testing.assert_array_equal(x, np.asarray(y)[:, examples])
      assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("examples", [[2], [-1], [], [0.5], 0])
def test_examples_that_are_none(examples):
  with pytest.raises(ShapeError, match="from 0 to 1"):
    create(8).take(np.array(examples))


def test_a_state_does_not_go_back():
  shape = StateShape(
    layers=1, heads=1, key=2, value=2, tail=1, convolved=((1, 2),) * 3
  )
  cache = KVCache.create((shape,), B, 4, jnp.float32)
  with pytest.raises(OptionError, match="does not go back"):
    cache.truncate(0)
  assert cache.take(jnp.array([1])).slots[0].memory.shape[1] == 1


def test_shape_and_bytes():
  cache = create(16)
  numbers = sum(s.numbers() for s in KINDS)
  assert numbers == 2 * 2 * 10 + 8
  assert cache.nbytes() == 16 * B * (4 * numbers + 8) + 2 * B * 4
  assert cache.capacity == 16 and cache.shards == 1
  assert create(16, 4).shards == 4


def test_where_it_lies():
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "model", "seq"), axis_types=(AxisType.Auto,) * 3
  )
  cache = KVCache.create(
    KINDS, B, 8, jnp.bfloat16, mesh=mesh, axis="seq", head_axis="model",
    batch_axes=("data",),
  )  # fmt: skip
  two, one = cache.slots
  lies = lambda x, *spec: x.sharding.is_equivalent_to(
    NamedSharding(mesh, P(*spec)), x.ndim
  )
  assert lies(two.k, None, "data", "model", "seq")
  # One head does not divide over two devices.
  assert lies(one.k, None, "data", None, "seq")
  assert lies(cache.at.pos, "data", "seq")
  assert two.k.dtype == jnp.bfloat16


@pytest.mark.parametrize(("capacity", "shards"), [(0, 1), (10, 4), (-4, 4)])
def test_capacities_that_are_none(capacity, shards):
  with pytest.raises(OptionError, match="capacity"):
    create(capacity, shards)
