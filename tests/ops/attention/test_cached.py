"""Queries that visit keys where they lie, against a float64 softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.views import ContiguousView
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.mask import Causal, Coords, SameSegment, Window
from tests.helpers import make_mesh

LAYERS, B, K, G, H, J = 3, 2, 2, 2, 16, 24


def problem(slots, queries, seed=0, used=0.8, dtype=np.float32):
  """A cache whose slots lie in any order, and queries behind its tokens."""
  r = np.random.default_rng(seed)
  normal = lambda *shape: r.normal(size=shape).astype(dtype)
  q = 2 * normal(B, K, G, queries, H)
  k, v = normal(LAYERS, B, K, slots, H), normal(LAYERS, B, K, slots, J)
  length = int(slots * used)
  pos = np.stack([r.permutation(slots) for _ in range(B)])
  seg = np.where(pos < length, 1 + (pos > length // 3), 0)
  q_pos = np.tile(np.arange(length - queries, length), (B, 1))
  q_seg = np.full((B, queries), 2)
  return q, k, v, (q_pos, q_seg), (pos, seg)


def truth(q, k, v, q_at, k_at, layer, *, window=None, cap=None, slopes=None,
          sinks=None):  # fmt: skip
  q, k, v = (x.astype(np.float64) for x in (q, k[layer], v[layer]))
  s = np.einsum("bkgth,bksh->bkgts", q, k) * H**-0.5
  if cap is not None:
    s = cap * np.tanh(s / cap)
  far = q_at[0][:, :, None] - k_at[0][:, None]
  see = (far >= 0) & (k_at[1][:, None] > 0) & (q_at[1][:, :, None] > 0)
  see &= q_at[1][:, :, None] == k_at[1][:, None]
  if window is not None:
    see &= far < window
  if slopes is not None:
    s = s - slopes[None, :, :, None, None] * np.abs(far)[:, None, None]
  s = np.where(see[:, None, None], s, -np.inf)
  top = np.maximum(s.max(-1, keepdims=True), -1e30)
  if sinks is not None:
    top = np.maximum(top, sinks[None, :, :, None, None])
  p = np.exp(s - top)
  total = p.sum(-1, keepdims=True)
  if sinks is not None:
    total = total + np.exp(sinks[None, :, :, None, None] - top)
  p = p / np.where(total == 0, 1, total)
  return np.einsum("bkgts,bksj->bkgtj", p, v)


def run(q, k, v, q_at, k_at, layer, shards=1, *, sharded=False, window=None,
        cap=None, slopes=None, sinks=None, **rest):  # fmt: skip
  mesh = make_mesh(shards, "auto") if shards > 1 else None
  mask = Causal() & SameSegment()
  mask = mask & Window(window) if window is not None else mask
  resident = ShardedDecode(
    mesh=mesh, axis=None if mesh is None else "seq", sharded=sharded, **rest
  )

  def put(x, *spec):
    x = jnp.asarray(x if x.dtype.kind == "f" else x.astype(np.int32))
    return (
      x if mesh is None else jax.device_put(x, NamedSharding(mesh, P(*spec)))
    )

  at_q = "seq" if sharded else None
  wide = lambda a: None if a is None else jnp.asarray(a, jnp.float32)
  f = jax.jit(
    lambda q, keys, terms, q_at: resident(
      Scores(scale=H**-0.5, soft_cap=cap), q, keys, terms, q_at, mask
    )
  )
  return f(
    put(q, None, None, None, at_q),
    (
      ContiguousView(
        put(k, None, None, None, "seq"),
        put(v, None, None, None, "seq"),
        Coords(*(put(x, None, "seq") for x in k_at)),
        jnp.int32(layer),
      ),
    ),
    Terms(slopes=wide(slopes), sinks=wide(sinks)),
    Coords(*(put(x, None, at_q) for x in q_at)),
  )


def close(got, want, tolerance=3e-6):
  got, want = np.asarray(got, np.float64), np.asarray(want)
  assert got.shape == want.shape
  assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


SLOPES, SINKS = np.array([[0.3, 0.1], [0.02, 0.5]]), np.array([[1, -1], [0, 3]])
OPTIONS = {
  "plain": {},
  "window": dict(window=9),
  "cap": dict(cap=2.0),
  "alibi": dict(slopes=SLOPES),
  "sinks": dict(sinks=SINKS.astype(np.float64)),
  "all": dict(window=40, cap=3.0, slopes=SLOPES, sinks=SINKS / 2),
}


@pytest.mark.one_case
@pytest.mark.parametrize(
  "shards", [1, pytest.param(4, marks=pytest.mark.slow), 8]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_one_query(name, shards):
  given = problem(96, 1)
  for layer in (0, 2):
    got = run(*given, layer, shards, **OPTIONS[name])
    close(got, truth(*given, layer, **OPTIONS[name]))


@pytest.mark.parametrize("slots", [1, 7, 128, 300, 1000])
def test_any_number_of_slots(slots):
  """Tiles that overlap at the end of the slots count nothing twice."""
  given = problem(slots, 1, used=1.0)
  close(run(*given, 1), truth(*given, 1))


@pytest.mark.parametrize("few", [0, 8, 64])
@pytest.mark.parametrize(("shards", "sharded"), [(1, False), (4, True)])
def test_chunks(shards, sharded, few):
  """Where keys lie or in a copy of the layer, queries sharded or not."""
  given = problem(96, 8)
  got = run(*given, 1, shards, sharded=sharded, few=few, **OPTIONS["all"])
  close(got, truth(*given, 1, **OPTIONS["all"]))


def test_nothing_to_see_is_zero():
  q, k, v, q_at, (pos, seg) = problem(32, 1)
  got = run(q, k, v, q_at, (pos, np.zeros_like(seg)), 0, 4)
  np.testing.assert_array_equal(got, np.zeros_like(got))


def test_what_is_not_seen_does_not_matter():
  """Bit for bit, even if it is no number."""
  q, k, v, q_at, k_at = problem(96, 1)
  want = run(q, k, v, q_at, k_at, 0, 4)
  hidden = (k_at[1] != 2)[None, :, None, :, None]
  k, v = (np.where(hidden, np.float32(np.nan), x) for x in (k, v))
  np.testing.assert_array_equal(run(q, k, v, q_at, k_at, 0, 4), want)


def test_half_precision_keys():
  q, k, v, q_at, k_at = problem(256, 1)
  half = lambda x: jnp.asarray(x, jnp.bfloat16)
  resident = ShardedDecode()
  got = resident(
    Scores(scale=H**-0.5),
    half(q),
    (
      ContiguousView(
        half(k),
        half(v),
        Coords(*(jnp.asarray(x, jnp.int32) for x in k_at)),
        jnp.int32(0),
      ),
    ),
    Terms(),
    Coords(*(jnp.asarray(x, jnp.int32) for x in q_at)),
    Causal() & SameSegment(),
  )  # fmt: skip
  assert got.dtype == jnp.bfloat16
  exact = [np.asarray(half(x), np.float32) for x in (q, k, v)]
  close(got, truth(*exact, q_at, k_at, 0), 4e-3)


def on_axes(heads, **options):
  """A call and its program on a mesh with axes of examples and of heads."""
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "model", "seq"), axis_types=(AxisType.Auto,) * 3
  )
  q, k, v, q_at, k_at = problem(64, 1)
  if heads == 1:
    q, k, v = q[:, :1], k[:, :, :1], v[:, :, :1]
  put = lambda x, *spec: jax.device_put(
    jnp.asarray(x if x.dtype.kind == "f" else x.astype(np.int32)),
    NamedSharding(mesh, P(*spec)),
  )
  of_keys, of_groups = ("model", None) if heads > 1 else (None, "model")
  keys = ContiguousView(
    put(k, None, "data", of_keys, "seq"),
    put(v, None, "data", of_keys, "seq"),
    Coords(*(put(x, "data", "seq") for x in k_at)),
    jnp.int32(1),
  )
  f = jax.jit(
    lambda q, keys, q_at: ShardedDecode(mesh=mesh, axis="seq", **options)(
      Scores(scale=H**-0.5), q, (keys,), Terms(), q_at, Causal() & SameSegment()
    )
  )
  at = Coords(*(put(x, "data") for x in q_at))
  given = (put(q, "data", of_keys, of_groups), keys, at)
  program = f.lower(*given).compile()
  assert "all-gather" not in program.as_text()
  close(program(*given), truth(q, k, v, q_at, k_at, 1))


@pytest.mark.parametrize("heads", [1, 2])
def test_all_axes_may_be_the_calls_own(heads):
  on_axes(heads, batch_axes=("data",), head_axes=("model",))
