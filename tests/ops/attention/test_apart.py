"""Keys that are weighed apart, against a float64 softmax of each formula."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.ops.attention.cached.cached_attention import (
  CacheVisit,
  ShardedDecode,
)
from ringjax.ops.attention.cached.separate_contexts import (
  SelectedView,
  WeighedView,
)
from ringjax.ops.attention.cached.view_statistics import view_statistics
from ringjax.ops.attention.cached.views import ContiguousView
from ringjax.ops.attention.scores import Scores, Terms
from ringjax.ops.mask import Causal, Coords
from tests.helpers import make_mesh

B, K, G, H, J, TILE = 2, 2, 2, 8, 12, 8
SLOPES = np.array([[0.3, 0.1], [0.02, 0.5]])


def problem(tiles, queries, own=24, seed=0):
  """Contexts in tiles, keys of the call's own, and queries behind all."""
  r = np.random.default_rng(seed)
  normal = lambda *shape: r.normal(size=shape).astype(np.float32)
  slots = tiles * TILE
  arrays = [
    (normal(1, B, K, n, H), normal(1, B, K, n, J)) for n in (slots, own)
  ]
  # Rows have contexts of other sizes; some tiles are empty.
  owner = np.sort(r.integers(0, 5, (B, tiles)), 1).astype(np.int32)
  owner[1, -1] = -1
  seg = np.repeat(owner >= 0, TILE, 1) & (r.random((B, slots)) < 0.8)
  pos = r.integers(0, 40, (B, slots))
  mine = np.tile(np.arange(40, 40 + own), (B, 1))
  ats = [(pos, seg), (mine, np.ones_like(mine))]
  q = 2 * normal(B, K, G, queries, H)
  q_at = np.tile(np.arange(40 + own - queries, 40 + own), (B, 1))
  return q, q_at, arrays, ats, owner


def scores(q, q_at, k, at, cap=None, slopes=None):
  s = np.einsum("bkgth,bksh->bkgts", *(x.astype(np.float64) for x in (q, k)))
  s = s * H**-0.5
  if cap is not None:
    s = cap * np.tanh(s / cap)
  far = q_at[:, :, None] - at[0][:, None]
  if slopes is not None:
    s = s - slopes[None, :, :, None, None] * np.abs(far)[:, None, None]
  see = (far >= 0) & (at[1][:, None] > 0)
  return np.where(see[:, None, None], s, -np.inf)


def weighed(exponents, values):
  """Sums of values by exp of exponents, [B, K, G, T, S] and [B, K, S, J]."""
  top = max(e.max() for e in exponents)
  p = [np.exp(e - top) for e in exponents]
  total = sum(x.sum(-1) for x in p)
  out = sum(
    np.einsum("bkgts,bksj->bkgtj", x, v) for x, v in zip(p, values, strict=True)
  )
  return out / total[..., None]


def run(given, wrap, shards=1, *, sharded=False, cap=None, slopes=None, few=16):
  q, q_at, arrays, ats, owner = given
  mesh = make_mesh(shards, "auto") if shards > 1 else None

  def put(x, *spec):
    x = jnp.asarray(x if x.dtype == np.float32 else x.astype(np.int32))
    if mesh is None:
      return x
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

  views = [
    ContiguousView(
      put(k, None, None, None, "seq"),
      put(v, None, None, None, "seq"),
      Coords(*(put(x, None, "seq") for x in at)),
      jnp.int32(0),
    )
    for (k, v), at in zip(arrays, ats, strict=True)
  ]
  views[0] = wrap(views[0], put(owner, None, "seq"))
  decode = ShardedDecode(
    mesh=mesh, axis=mesh and "seq", sharded=sharded, few=few
  )
  at_q = "seq" if sharded else None
  terms = Terms(
    slopes=None if slopes is None else jnp.asarray(slopes, jnp.float32)
  )
  return jax.jit(
    lambda q, views, q_at: decode(
      Scores(scale=H**-0.5, soft_cap=cap), q, views, terms, q_at, Causal()
    )
  )(
    put(q, None, None, None, at_q),
    tuple(views),
    Coords(put(q_at, None, at_q), put(np.ones_like(q_at), None, at_q)),
  )


EXTRAS = {"plain": {}, "cap and alibi": dict(cap=2.0, slopes=SLOPES)}


@pytest.mark.one_case
@pytest.mark.parametrize(
  ("shards", "sharded"), [(1, False), (4, False), (4, True)]
)
@pytest.mark.parametrize("extras", EXTRAS)
def test_temperature_and_scale(extras, shards, sharded):
  """exp(S log sum exp(s / T)) beside the sum of the other exponentials."""
  extras, temperature, scale = EXTRAS[extras], 0.7, 0.6
  given = q, q_at, arrays, ats, _ = problem(16, 20)
  wrap = lambda view, owner: WeighedView(view, jnp.float32(scale), temperature)
  got = run(given, wrap, shards, sharded=sharded, **extras)
  s = [
    scores(q, q_at, k[0], at, **extras)
    for (k, _), at in zip(arrays, ats, strict=True)
  ]
  cool = s[0] / temperature
  lse = np.log(np.exp(cool).sum(-1, keepdims=True))
  want = weighed([cool - lse + scale * lse, s[1]], [v[0] for _, v in arrays])
  np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


def chosen(p, owner, keep, by):
  """Which contexts are read, bool [B, P, K, G, T], by what they get."""
  count = owner.max() + 1
  tops = np.zeros((B, count, *p.shape[1:4]))
  of_slot = np.repeat(owner, TILE, 1)
  for b in range(B):
    for n in range(count):
      mine = np.sort(p[b][..., of_slot[b] == n], -1)[..., ::-1]
      tops[b, n] = mine[..., :5].sum(-1)
  if by in ("head", "call"):
    tops = tops.sum(4, keepdims=True)
  if by in ("token", "call"):
    tops = tops.sum((2, 3), keepdims=True)
  rank = np.argsort(np.argsort(-tops, 1, kind="stable"), 1, kind="stable")
  return np.broadcast_to(rank < keep, (B, count, *p.shape[1:4]))


@pytest.mark.one_case
@pytest.mark.parametrize("by", ["query", "token", "head", "call"])
@pytest.mark.parametrize(
  ("shards", "sharded"), [(1, False), (4, False), (4, True)]
)
def test_selection(by, shards, sharded):
  compare_selection(by, shards, sharded)


def test_heads_of_all_shards_select_together():
  """Probabilities of heads add up only over one maximum of all shards."""
  compare_selection("token", 4, False)


def compare_selection(by, shards, sharded):
  given = q, q_at, arrays, ats, owner = problem(16, 20, seed=2)
  wrap = lambda view, owner: SelectedView(view, owner, 8, 2, by)
  got = run(given, wrap, shards, sharded=sharded)
  s = [
    scores(q, q_at, k[0], at) for (k, _), at in zip(arrays, ats, strict=True)
  ]
  both = np.concatenate(s, -1)
  p = np.exp(both - both.max(-1, keepdims=True))
  p = p / p.sum(-1, keepdims=True)
  kept = chosen(p[..., : s[0].shape[-1]], owner, 2, by)
  of_slot = np.repeat(owner, TILE, 1)
  stays = np.stack([kept[b][of_slot[b]] for b in range(B)])
  s[0] = np.where(np.moveaxis(stays, 1, -1), s[0], -np.inf)
  want = weighed(s, [v[0] for _, v in arrays])
  np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
  "way",
  [
    "call",
    "cooled",
    *(
      pytest.param(x, marks=pytest.mark.long)
      for x in ("query", "token", "head", "plain")
    ),
  ],
)
def test_statistics_of_what_is_read(way):
  """Entropy of the very weights by which values are summed."""
  q, q_at, arrays, ats, owner = problem(16, 6, seed=2)
  s = [
    scores(q, q_at, k[0], at) for (k, _), at in zip(arrays, ats, strict=True)
  ]
  wrap = lambda view: view
  if way == "cooled":
    wrap = lambda view: WeighedView(view, jnp.float32(0.6), 0.7)
    cool = s[0] / 0.7
    s[0] = cool + (0.6 - 1) * np.log(np.exp(cool).sum(-1, keepdims=True))
  elif way != "plain":
    wrap = lambda view: SelectedView(view, jnp.asarray(owner), 8, 2, way)
    both = np.concatenate(s, -1)
    p = np.exp(both - both.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    kept = chosen(p[..., : s[0].shape[-1]], owner, 2, way)
    of_slot = np.repeat(owner, TILE, 1)
    stays = np.stack([kept[b][of_slot[b]] for b in range(B)])
    s[0] = np.where(np.moveaxis(stays, 1, -1), s[0], -np.inf)
  sinks = np.random.default_rng(1).normal(size=(K, G)).astype(np.float32)
  logits = np.concatenate(
    [*s, np.broadcast_to(sinks[None, :, :, None, None], (*q.shape[:4], 1))], -1
  )
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p = p / p.sum(-1, keepdims=True)
  want = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
  low = np.concatenate([at[0] < 20 for at in ats], -1)
  mass = np.where(low[:, None, None, None], p[..., :-1], 0).sum(-1)
  coords = lambda pos, seg: Coords(*(jnp.asarray(x, jnp.int32)
                                     for x in (pos, seg)))  # fmt: skip
  views = [
    ContiguousView(jnp.asarray(k), jnp.asarray(v), coords(*at), jnp.int32(0))
    for (k, v), at in zip(arrays, ats, strict=True)
  ]
  visit = CacheVisit(
    q=jnp.asarray(q),
    at=coords(q_at, np.ones_like(q_at)),
    terms=Terms(),
    mask=Causal(),
    scores=Scores(scale=H**-0.5),
    local=None,
    decoder=None,
    few=0,
  )
  found = jax.jit(
    lambda visit_q, views: view_statistics(
      dataclasses.replace(visit, q=visit_q),
      [wrap(views[0]), views[1]],
      jnp.asarray(sinks),
      20,
    )
  )(visit.q, views)
  flat = lambda x: np.moveaxis(x, 3, 1).reshape(B, q.shape[3], -1)
  np.testing.assert_allclose(found.entropy, flat(want), atol=2e-5)
  np.testing.assert_allclose(found.kept_mass, flat(mass), atol=2e-5)


@pytest.mark.parametrize("few", [16, 1])
def test_all_selected_or_neutral_is_plain(few):
  given = problem(16, 5, seed=3)
  plain = run(given, lambda view, owner: view, few=few)
  every = run(given, lambda v, owner: SelectedView(v, owner, 8, 8, "query"))
  neutral = run(given, lambda v, _: WeighedView(v, jnp.float32(1), 1.0))
  for other in (every, neutral):
    np.testing.assert_allclose(other, plain, atol=1e-5, rtol=1e-5)
