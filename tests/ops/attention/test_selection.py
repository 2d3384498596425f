"""Queries that read the keys of an index: against loops in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringjax.ops.attention.cached import selection, views
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.selection import KeySelection
from ringjax.ops.attention.cached.views import ContiguousView
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Causal, Coords, Everything
from ringjax.ops.softmax import finalize
from tests.helpers import make_mesh

B, T, S, HEADS, DIM, FIRST, INDEX = 2, 40, 640, 3, 6, 4, 2
SCALE = 0.4


def operands(rng, queries, ties):
  """Rows [latent, index's key] and queries; of few numbers if `ties`."""
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  if ties:
    draw = lambda *shape: rng.integers(-1, 2, shape).astype(np.float32)
  return dict(
    index=draw(B, queries, 2, INDEX),
    weights=draw(B, queries, 2),
    q=rng.standard_normal((B, queries, HEADS, DIM)).astype(np.float32),
    keys=np.concatenate(
      [
        rng.standard_normal((B, S, FIRST)).astype(np.float32),
        draw(B, S, INDEX),
      ],
      -1,
    ),
  )


def best(x, q_at, k_at, count):
  """bool [B, T, S]: which keys are read, one query after another."""
  out = np.zeros((B, x["index"].shape[1], S), bool)
  for b, t in np.ndindex(out.shape[:2]):
    found = []
    for s in range(S):
      if not k_at[1][b, s] or k_at[0][b, s] > q_at[b, t]:
        continue
      dots = x["index"][b, t] @ x["keys"][b, s, FIRST:]
      score = np.float32(x["weights"][b, t] @ np.maximum(dots, 0))
      found.append((-score, k_at[0][b, s], s))
    for _, _, s in sorted(found)[:count]:
      out[b, t, s] = True
  return out


def read(x, pairs):
  """[B, T, N, FIRST]: attention to these pairs; values are parts of keys."""
  s = np.einsum("btnd,bsd->btns", x["q"], x["keys"]) * SCALE
  s = np.where(pairs[:, :, None], s, -np.inf)
  top = s.max(-1, keepdims=True)
  p = np.exp(s - np.where(np.isfinite(top), top, 0))
  p /= np.maximum(p.sum(-1, keepdims=True), 1e-30)
  return np.einsum("btns,bsd->btnd", p, x["keys"])[..., :FIRST]


def coordinates(rng, queries):
  """Slots in any order, some empty; the last tokens ask."""
  pos = np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32)
  seg = (pos < np.array([S - 7, S])[:, None]).astype(np.int32)
  last = np.array([S - 7, S])[:, None]
  return (last - queries + np.arange(queries)).astype(np.int32), (pos, seg)


def selected(x, count, **more):
  return KeySelection(
    q=jnp.asarray(x["index"]),
    weights=jnp.asarray(x["weights"]),
    count=count,
    first=FIRST,
    **more,
  )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
  ("shards", "queries", "cut"),
  [(1, 1, S), (4, 3, 40),
   *(pytest.param(*x, marks=pytest.mark.long)
     for x in ((2, 1, S), (4, 1, S), (4, 1, 40), (1, T, S), (2, T, 40)))],
)  # fmt: skip
def test_reading_a_cache(shards, queries, cut, ties, monkeypatch):
  """One view or two over any number of shards, some queries at a time.

  Queries gather the keys that they read out of the only view, where these are
  at most half of a shard's slots.
  """
  rng = np.random.default_rng(1)
  x = operands(rng, queries, ties)
  q_at, k_at = coordinates(rng, queries)
  monkeypatch.setattr(selection, "_ROWS", 16 * HEADS)
  # Tiles of 128 slots, of which the last begins early.
  monkeypatch.setitem(views.TILE_BYTES, "cpu", 1)
  mesh = make_mesh(shards, "auto") if shards > 1 else None
  axis = None if mesh is None else "seq"

  def view(part):
    k = jnp.asarray(x["keys"][None, :, None, part])
    at = Coords(*(jnp.asarray(a[:, part]) for a in k_at))
    return ContiguousView(k, k, at, jnp.int32(0))

  def run(x):
    out = ShardedDecode(mesh=mesh, axis=axis)(
      Scores(scale=SCALE),
      jnp.transpose(x["q"], (0, 2, 1, 3))[:, None],
      tuple(map(view, (slice(0, cut), slice(cut, S))[: 1 + (cut < S)])),
      Terms(),
      Coords(jnp.asarray(q_at), jnp.ones_like(q_at)),
      Causal(),
      selected(x, 9),
    )
    return jnp.transpose(out[:, 0], (0, 2, 1, 3))

  got = jax.jit(run)(jax.tree.map(jnp.asarray, x))[..., :FIRST]
  want = read(x, best(x, q_at, k_at, 9))
  np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.long
def test_many_queries_read_chosen_keys_as_few_do(monkeypatch):
  """Choices are in whole tiles, of a size that both have in common."""
  monkeypatch.setattr(views, "in_order", lambda view: True)
  slots, block, dim = 1000, 512, 8
  draw = np.random.default_rng(3).normal
  array = lambda *shape: jnp.asarray(draw(size=shape), jnp.float32)
  monkeypatch.setattr(views, "tile_slots", lambda *_: block)
  at = Coords(
    jnp.arange(slots, dtype=jnp.int32)[None], jnp.ones((1, slots), jnp.int32)
  )
  view = ContiguousView(
    array(1, 1, 1, slots, dim), array(1, 1, 1, slots, dim), at, jnp.int32(0)
  )
  tiled_slots = views.tiled(at, block).pos.shape[1]
  q = array(1, 1, 1, 16, dim)

  def read(count):
    q_at = Coords(*(jnp.full((1, count), n, jnp.int32) for n in (slots, 1)))
    pos = views.tiled(at, block).pos
    chosen = (pos >= 700) & (pos < 720)
    allow = jnp.broadcast_to(
      chosen[:, None, None, None], (1, 1, 1, count, tiled_slots)
    )
    context = Context(q_at, at, Everything(), allow)
    args = ScoreArgs(Scores(scale=1.0), Terms(), context)
    partial = views.decode_attention(q[:, :, :, :count], view, args)
    return finalize(partial)[0]

  keys, values = view.k[0, 0, 0, 700:720], view.v[0, 0, 0, 700:720]
  want = jax.nn.softmax(q[0, 0, 0] @ keys.T, -1) @ values
  for count in (15, 16):
    np.testing.assert_allclose(read(count)[0, 0, 0], want[:count], atol=1e-5)
