"""A few queries that gather chosen keys: equal to masking, and what is read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.kv.cache_kind import cache_kind
from ringjax.ops.attention.cached import block_reading, selection
from ringjax.ops.attention.cached.block_reading import BlockReading
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.native_reading import (
  NativeReading,
  PoolingWeights,
)
from ringjax.ops.attention.cached.pooled import PooledView
from ringjax.ops.attention.cached.selection import KeySelection
from ringjax.ops.attention.cached.views import (
  ContiguousView,
  Decoder,
  EncodedView,
  UnrotatedView,
)
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.attention.sparse.native_sparse import NativeSparse
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.rope import Rope, Rotation
from tests.helpers import make_mesh, mesh_of

B, K, G, T, S, H, J, PAGE = 2, 2, 3, 2, 96, 8, 4, 8
SIZES = NativeSparse(
  length=4, stride=2, block=4, count=3, initial=1, local=1, window=5
)
CHOICES = ("index", "blocks", "native")
VIEWS = ("contiguous", "unrotated", "int8", "turned_int8", "pool")


def draw(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def coords():
  """Rows of 83 and 70 tokens, in any order of slots."""
  rng = np.random.default_rng(7)
  pos = np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32)
  seg = (pos < np.asarray([[83], [70]])).astype(np.int32)
  return Coords(jnp.asarray(pos * seg), jnp.asarray(seg))


def view_of(kind, heads=K, value=J, seed=0):
  """A view of random keys and values."""
  at, zero = coords(), jnp.int32(0)
  k, v = (
    jnp.asarray(draw(seed + n, 1, B, heads, S, d))
    for n, d in enumerate((H, value))
  )
  if kind == "unrotated":
    rotation = Rotation(rope=Rope(theta=1e4, dims=H), length=S)
    return UnrotatedView(ContiguousView(k, v, at, zero), rotation)
  if kind in ("int8", "turned_int8"):
    codec = cache_kind("int8").codec
    vectors = codec.keys, codec.values
    codes = [
      c.encode(x[0], ())[None] for c, x in zip(vectors, (k, v), strict=True)
    ]
    if kind == "turned_int8":
      turn = lambda x: jax.lax.bitcast_convert_type(
        jnp.swapaxes(x, -1, -2), jnp.int8
      )
      codes = list(map(turn, codes))
    decoders = tuple(
      Decoder(c, d, jnp.float32)
      for c, d in zip(vectors, (H, value), strict=True)
    )
    return EncodedView(*codes, at, zero, ((), ()), decoders)
  if kind == "pool":
    # Slots are in the order of positions, pages anywhere.
    order = np.random.default_rng(1).permutation(B * S // PAGE)
    table = jnp.asarray(order.reshape(B, -1), jnp.int32)
    pos = np.broadcast_to(np.arange(S), (B, S))
    seg = (pos < np.asarray([[83], [70]])).astype(np.int32)
    at = Coords(jnp.asarray(pos * seg, jnp.int32), jnp.asarray(seg))

    def pages(x):
      x = x.reshape(B, heads, -1, PAGE, x.shape[-1]).swapaxes(1, 2)
      x = x.reshape(-1, heads, PAGE, x.shape[-1])
      return jnp.zeros_like(x).at[table.reshape(-1)].set(x)[None]

    return PooledView(pages(k), pages(v), at, table, zero)
  return ContiguousView(k, v, at, zero)


def chosen(choice, views, heads=K):
  if choice == "index":
    index_view = dataclasses.replace(
      view_of("contiguous", heads=1, value=0, seed=5), at=views[0].at
    )
    return KeySelection(
      q=jnp.asarray(draw(3, B, T, 2, H)),
      weights=jnp.asarray(draw(4, B, T, 2)),
      count=9,
      first=0,
      views=(index_view.keys_alone(),),
    )
  if choice == "blocks":
    return BlockReading(count=3, block=4)
  weights = PoolingWeights(
    *(
      jnp.asarray(draw(6 + n, SIZES.length, heads, d))
      for n, d in enumerate((H, J))
    )
  )
  return NativeReading(config=SIZES, weights=weights)


def attend(choice, kind, mesh=None, heads=K, group=G, **sharding):
  views = (view_of(kind, heads),)
  groups = 3 * group if choice == "native" else group
  q = jnp.asarray(draw(2, B, heads, groups, T, H))
  at = Coords(*(jnp.asarray(x) for x in ([[81, 82], [68, 69]], [[1, 1]] * 2)))
  axis = None if mesh is None else "seq"
  decode = ShardedDecode(mesh=mesh, axis=axis, **sharding)
  scores = Scores(scale=H**-0.5)
  run = lambda q, views, selection: decode(
    scores, q, views, Terms(), at, Causal(), selection
  )
  return run, (q, views, chosen(choice, views, heads))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
  "kind",
  [VIEWS[0], *(pytest.param(x, marks=pytest.mark.long) for x in VIEWS[1:])],
)
def test_gathered_keys_give_what_masked_ones_do(choice, kind, monkeypatch):
  run, operands = attend(choice, kind)
  gathered = jax.jit(run)(*operands)
  never = lambda *_: False
  monkeypatch.setattr(block_reading, "reads_fewer", never)
  monkeypatch.setattr(selection, "reads_fewer", never)
  masked = jax.jit(lambda *x: run(*x))(*operands)
  np.testing.assert_allclose(gathered, masked, atol=1e-5, rtol=0)
  assert np.abs(np.asarray(masked)).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("choice", CHOICES)
def test_shards_gather_their_own_keys(choice):
  run, operands = attend(choice, "contiguous", make_mesh(4, "auto"))
  alone, _ = attend(choice, "contiguous")
  np.testing.assert_allclose(
    jax.jit(run)(*operands), jax.jit(alone)(*operands), atol=1e-5, rtol=0
  )


@pytest.mark.long
@pytest.mark.parametrize("heads", [1, 2])
def test_native_heads_may_be_sharded(heads):
  """The query heads of a single kv head choose together on their shards."""
  sizes = {"heads": heads, "group": 2}
  mesh = mesh_of(seq=2, model=2)
  run, operands = attend(
    "native", "contiguous", mesh, head_axes=("model",), **sizes
  )
  alone, _ = attend("native", "contiguous", **sizes)
  np.testing.assert_allclose(
    jax.jit(run)(*operands), jax.jit(alone)(*operands), atol=1e-5, rtol=0
  )


def readers(jaxpr, shape):
  """Primitives that read an array of this shape, loops and calls aside."""
  names = set()
  for eqn in jaxpr.eqns:
    inner = [
      x.jaxpr if hasattr(x, "jaxpr") else x
      for value in eqn.params.values()
      for x in (value if isinstance(value, tuple | list) else (value,))
      if hasattr(x, "eqns") or hasattr(x, "jaxpr")
    ]
    for part in inner:
      names |= readers(part, shape)
    if not inner and any(x.aval.shape == shape for x in eqn.invars):
      names.add(eqn.primitive.name)
  return names


@pytest.mark.parametrize("choice", ["index", "blocks"])
def test_values_are_read_by_gathers_alone(choice, monkeypatch):
  """An index gathers the keys, too; blocks read all keys for the means."""
  run, operands = attend(choice, "contiguous")
  of_values = lambda: readers(
    jax.make_jaxpr(lambda *x: run(*x))(*operands).jaxpr, (1, B, K, S, J)
  )
  of_keys = readers(jax.make_jaxpr(run)(*operands).jaxpr, (1, B, K, S, H))
  assert of_values() == {"gather"}
  means = {"dynamic_slice"} if choice == "blocks" else set()
  # A view of one tile is cut to its layer.
  assert of_keys - {"squeeze"} == {"gather"} | means
  monkeypatch.setattr(block_reading, "reads_fewer", lambda *_: False)
  monkeypatch.setattr(selection, "reads_fewer", lambda *_: False)
  assert "dynamic_slice" in of_values()
