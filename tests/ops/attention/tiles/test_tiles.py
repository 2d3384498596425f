"""Attention over chosen tiles equals dense attention under their mask."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.ops.attention.tiles.patterns import PATTERNS, pattern_of
from ringjax.ops.attention.tiles.tile_shards import tile_owners
from ringjax.parallel.layout import Uneven
from tests.helpers import make_mesh

BLOCK = 64


def operands(t=300, s=None, b=2, heads=4, kv_heads=2, dim=16, seed=0):
  """Queries and keys whose products differ from tile to tile."""
  rng = np.random.default_rng(seed)
  s = t if s is None else s
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k = normal(b, t, heads, dim), normal(b, s, kv_heads, dim)
  k += 2 * np.repeat(normal(b, -(-s // 32), kv_heads, dim), 32, 1)[:, :s]
  q += np.repeat(normal(b, -(-t // 32), heads, dim), 32, 1)[:, :t]
  return q, k, normal(b, s, kv_heads, dim)


def pairs(t, s, window=None, segments=None):
  """Visible pairs of causal attention, bool [B or 1, T, S]."""
  at, key = np.arange(t)[:, None], np.arange(s)
  seen = key <= at
  if window is not None:
    seen &= key > at - window
  if segments is None:
    return seen[None]
  same_document = segments[:, :, None] == segments[:, None]
  return seen[None] & same_document & (segments != 0)[:, :, None]


def attend(q, k, v, seen, soft_cap=None, sinks=None):
  """Attention by definition: (output, log-sum-exp), seen bool [B, N, T, S]."""
  group = q.shape[2] // k.shape[2]
  k, v = (np.repeat(x.astype(np.float64), group, 2) for x in (k, v))
  scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[3])
  if soft_cap is not None:
    scores = soft_cap * np.tanh(scores / soft_cap)
  scores = np.where(seen, scores, -np.inf)
  if sinks is not None:
    sink = np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    scores = np.concatenate([scores, sink], 3)
  with np.errstate(divide="ignore"):
    top = np.maximum(scores.max(3, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    total = weights.sum(3, keepdims=True)
    lse = (top + np.log(total))[..., 0]
  weights = np.divide(weights, total, where=total > 0, out=0 * weights)
  out = np.einsum("bnts,bsnj->btnj", weights[..., : k.shape[1]], v)
  return out, np.moveaxis(lse, 1, 2)


def tile_view(x, block=BLOCK):
  """[..., T, S] as [..., m, block, n, block], padded with zeros."""
  t, s = x.shape[-2:]
  widths = [(0, 0)] * (x.ndim - 2) + [(0, -t % block), (0, -s % block)]
  x = np.pad(x, widths)
  return x.reshape(*x.shape[:-2], x.shape[-2] // block, block, -1, block)


def smallest_set(mass, visible, required, threshold):
  """Tiles that reach a part of the mass, by definition, of one query block."""
  order = sorted(
    np.flatnonzero(visible), key=lambda j: (not required[j], -mass[j])
  )
  chosen, reached = required.copy(), 0.0
  total = mass[visible].sum()
  for j in order:
    if reached >= threshold * total:
      break
    chosen[j] = True
    reached += mass[j]
  return chosen


def always(seen):
  """Visible tiles, and of these the diagonal and the first, [..., m, n]."""
  visible = tile_view(seen).any((-3, -1))
  m, n = visible.shape[-2:]
  first = visible & (np.cumsum(visible, -1) == 1)
  own_tiles = np.arange(m)[:, None] == np.arange(n)
  return visible, visible & (own_tiles | first)


def xattention(q, k, seen, pattern, soft_cap=None):
  """Chosen tiles of XAttention by definition, bool [B, N, m, n]."""
  group, stride = q.shape[2] // k.shape[2], pattern.stride
  k = np.repeat(k.astype(np.float64), group, 2)
  dots = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[3])
  real_q = seen.any(2)[:, None, :, None]
  real_k = seen.any(1)[:, None, None]
  dots = np.where(real_q & real_k, dots, 0)
  squares = tile_view(dots, stride)
  # Query i of a square meets key stride - 1 - i.
  means = np.einsum("bnmisi->bnms", squares[..., ::-1]) / stride
  if soft_cap is not None:
    means = soft_cap * np.tanh(means / soft_cap)
  any_pairs = tile_view(seen, stride).any((-3, -1))[:, None]
  means = np.where(any_pairs, means, -np.inf)
  with np.errstate(invalid="ignore"):
    weights = np.exp(means - means.max(-1, keepdims=True))
  weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
  mass = tile_view(weights, BLOCK // stride).sum((-3, -1))
  visible, required = always(seen)
  b, heads, m, n = mass.shape
  chosen = np.zeros((b, heads, m, n), bool)
  for row, head, i in np.ndindex(b, heads, m):
    at = min(row, len(visible) - 1), i
    chosen[row, head, i] = smallest_set(
      mass[row, head, i], visible[at], required[at], pattern.threshold
    )
  return chosen


def softmax(s):
  """Softmax over the last axis, 0 where nothing is seen."""
  with np.errstate(invalid="ignore"):
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.nan_to_num(p / p.sum(-1, keepdims=True))


def best_lines(mass, gamma, least):
  """Lines that reach a part of the mass, at least some, by definition."""
  order = np.argsort(-mass, kind="stable")
  chosen, reached = np.zeros(len(mass), bool), 0.0
  for place, at in enumerate(order):
    if mass[at] > 0 and (place < least or reached < gamma * mass.sum()):
      chosen[at] = True
    reached += mass[at]
  return chosen


def means(x, real):
  """Means of blocks of vectors, without padding, by definition."""
  parts = range(0, len(x), BLOCK)
  mean = lambda a: (
    x[a : a + BLOCK][real[a : a + BLOCK]].sum(0)
    / max(1, real[a : a + BLOCK].sum())
  )
  return np.stack([mean(a) for a in parts])


def crossed_pairs(weights, last, t, part, counts):
  """Pairs that the best vertical and slash lines cross, by definition."""
  keys = weights.shape[1]
  distances = np.arange(last.start, last.stop)[:, None] - np.arange(keys)
  slash = np.zeros(t)
  np.add.at(slash, np.maximum(distances, 0), weights)
  vertical = best_lines(weights.sum(0), part, counts[0])
  slashes = best_lines(slash, part, counts[1])
  between = np.arange(t)[:, None] - np.arange(keys)
  crossed = vertical[None] | slashes[np.maximum(between, 0)]
  # Lines cross a tile also where its pairs are masked.
  crossed &= (between >= 0) | vertical[None]
  return crossed


def flexprefill(q, k, seen, pattern, soft_cap=None):
  """Chosen tiles of FlexPrefill by definition, bool [B, N, m, n]."""
  group = q.shape[2] // k.shape[2]
  k = np.repeat(k.astype(np.float64), group, 2)
  cap = lambda s: s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
  scale = 1 / math.sqrt(q.shape[3])
  real_q, real_k = seen.any(2), seen.any(1)
  visible, required = always(seen)
  b, t, heads, _ = q.shape
  chosen = np.zeros((b, heads, *visible.shape[1:]), bool)

  for row, head in np.ndindex(b, heads):
    queries, keys = q[row, :, head], k[row, :, head]
    end = np.flatnonzero(real_q[row])[-1] + 1
    last = slice(max(0, end - BLOCK), end)
    scores = cap(queries[last] @ keys.T * scale)
    weights = softmax(np.where(seen[row, last], scores, -np.inf))
    k_means = means(keys, real_k[row])
    q_mean = queries[last][real_q[row, last]].mean(0)
    any_pairs = tile_view(seen[row, last].any(0)[None]).any((0, 1, 3))
    estimate = softmax(
      np.where(any_pairs, cap(q_mean @ k_means.T * scale), -np.inf)
    )
    exact = np.pad(weights.mean(0), (0, -len(keys) % BLOCK))
    exact = exact.reshape(-1, BLOCK).sum(1)
    middle = (exact + estimate) / 2
    kl = lambda p, m: sum(
      a * np.log(a / c) for a, c in zip(p, m, strict=True) if a
    )
    distance = math.sqrt((kl(exact, middle) + kl(estimate, middle)) / 2)
    if distance < pattern.tau:
      q_means = means(queries, real_q[row])
      s = cap(q_means @ k_means.T * scale)
      mass = softmax(np.where(visible[row], s, -np.inf))
      for i in range(len(mass)):
        chosen[row, head, i] = smallest_set(
          mass[i], visible[row, i], required[row, i], pattern.gamma
        )
      continue
    part, counts = pattern.gamma, (pattern.least_tokens,) * 2
    crossed = crossed_pairs(weights, last, t, part, counts)
    crossed = tile_view(crossed).any((1, 3))
    chosen[row, head] = (crossed & visible[row]) | required[row]
  return chosen


def minference(q, k, seen, pattern, soft_cap=None):
  """Chosen tiles of MInference by definition, bool [B, N, m, n]."""
  group = q.shape[2] // k.shape[2]
  k = np.repeat(k.astype(np.float64), group, 2)
  cap = lambda s: s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
  scale = 1 / math.sqrt(q.shape[3])
  real_q, real_k = seen.any(2), seen.any(1)
  visible, _ = always(seen)
  b, t, heads, _ = q.shape
  chosen = np.zeros((b, heads, *visible.shape[1:]), bool)
  number = np.arange(k.shape[1])
  tiles_of = lambda keys: tile_view(keys[None]).any((0, 1, 3))

  def shapes(at, row, q, k_means, crossed):
    """Tiles of the three shapes of the queries at some places, [3, n]."""
    tiles = tiles_of(seen[row, at].any(0))
    first = np.flatnonzero(tiles)[0]
    required = (number >= at.start) & (number < at.stop)
    required = tiles_of(required) & tiles
    required[first] = True
    near = number < first * BLOCK + pattern.first
    near |= number > at.start - pattern.window
    mean = q[at][real_q[row, at]].mean(0)
    mass = np.where(tiles, cap(mean @ k_means.T * scale), -np.inf)
    order = sorted(range(len(mass)), key=lambda j: (not required[j], -mass[j]))
    largest = np.isin(range(len(mass)), order[: -(-pattern.tokens // BLOCK)])
    chosen = np.stack([tiles_of(near), tiles_of(crossed[at].any(0)), largest])
    return (chosen & tiles) | required

  for row, head in np.ndindex(b, heads):
    queries, keys = q[row, :, head], k[row, :, head]
    end = np.flatnonzero(real_q[row])[-1] + 1
    last = slice(max(0, end - 64), end)
    scores = cap(queries[last] @ keys.T * scale)
    weights = softmax(np.where(seen[row, last], scores, -np.inf))
    counts = pattern.vertical, pattern.slash
    crossed = crossed_pairs(weights, last, t, 0, counts)
    fixed = row, queries, means(keys, real_k[row]), crossed
    tiles = shapes(last, *fixed)
    reached = (tiles * tile_view(weights).sum((0, 1, 3)) / len(weights)).sum(1)
    near = reached >= reached.max() - 0.01
    best = np.argmin(np.where(near, tiles.sum(1), 10**9))
    if pattern.shape != "auto":
      best = ["a_shape", "vertical_slash", "blocks"].index(pattern.shape)
    SHAPES_CHOSEN.add(int(best))
    for i in np.flatnonzero(visible[row].any(1)):
      at = slice(i * BLOCK, min(t, (i + 1) * BLOCK))
      chosen[row, head, i] = shapes(at, *fixed)[best]
  return chosen


# Shapes that heads took in the tests, by index.
SHAPES_CHOSEN: set[int] = set()
CHOICES = {
  "xattention": xattention,
  "flexprefill": flexprefill,
  "minference": minference,
}


def expanded(chosen, t, s):
  """Chosen tiles as pairs, bool [B, N, T, S]."""
  chosen = np.repeat(np.repeat(chosen, BLOCK, -2), BLOCK, -1)
  return chosen[..., :t, :s]


def check(name, text, q, k, v, *, mesh=None, layout=None, window=None,
          segments=None, soft_cap=None, sinks=None):  # fmt: skip
  """Compares a call with its definition; returns the part that is computed."""
  pattern = pattern_of(f"{name},block={BLOCK},{text}")
  seen = pairs(q.shape[1], k.shape[1], window, segments)
  seen = np.broadcast_to(seen, (q.shape[0], *seen.shape[1:]))
  choose = lambda cap: CHOICES[name](q, k, seen, pattern, cap)
  chosen = choose(soft_cap)
  allowed = seen[:, None] & expanded(chosen, *seen.shape[1:])
  want, want_lse = attend(q, k, v, allowed, soft_cap, sinks)
  ordered = lambda x: jnp.asarray(x)
  if layout is not None:
    ordered = lambda x: jnp.asarray(layout.permute(x, shards=mesh.size))
  results = rj.tile_attention(
    *map(ordered, (q, k, v)),
    pattern,
    is_causal=True,
    mesh=mesh,
    layout=layout,
    strategy=None if layout is None else "ring",
    local_window_size=None if window is None else (window - 1, 0),
    q_segment_ids=None if segments is None else ordered(segments),
    logits_soft_cap=soft_cap,
    sinks=None if sinks is None else jnp.asarray(sinks),
    return_residual=True,
    return_tiles=True,
  )
  if layout is not None:
    results = layout.restore(jax.device_get(results), shards=mesh.size)
  out, lse, tiles = results
  counts = np.repeat(chosen.sum(-1), BLOCK, -1)[..., : q.shape[1]]
  np.testing.assert_array_equal(tiles.chosen, np.moveaxis(counts, 1, 2))
  np.testing.assert_allclose(out, want, atol=2e-5)
  np.testing.assert_allclose(lse, want_lse, atol=2e-5)
  visible = always(seen)[0].sum(-1)
  assert np.asarray(tiles.visible)[:, ::BLOCK].max(2).tolist() == (
    visible.tolist()
  )
  return chosen.sum() / (visible.sum() * q.shape[2])


TEXTS = {
  "xattention": "threshold=0.8,stride=16",
  "flexprefill": "gamma=0.5,tau=0.3,least_tokens=0",
  "minference": "first=64,window=64,vertical=4,slash=8,tokens=128",
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_result_is_dense_attention_under_the_chosen_tiles(name):
  # Fewer than all tiles are computed, so that the choice matters.
  assert check(name, TEXTS[name], *operands()) < 0.95


def test_heads_of_a_prompt_take_different_shapes():
  SHAPES_CHOSEN.clear()
  check("minference", TEXTS["minference"], *operands(seed=1))
  assert len(SHAPES_CHOSEN) > 1


@pytest.mark.long
@pytest.mark.parametrize("shape", ["a_shape", "vertical_slash", "blocks"])
def test_all_heads_take_the_shape_that_is_asked_for(shape):
  text = f"shape={shape},{TEXTS['minference']}"
  assert check("minference", text, *operands()) < 1


@pytest.mark.long
@pytest.mark.parametrize("name", TEXTS)
def test_windows_documents_padding_sinks_and_caps_combine(name):
  segments = np.repeat([[1, 2, 0], [3, 3, 3]], 100, 1).astype(np.int32)
  sinks = np.linspace(-1, 1, 4, dtype=np.float32)
  check(
    name, TEXTS[name], *operands(), window=150, segments=segments,
    soft_cap=3.0, sinks=sinks,
  )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", TEXTS)
def test_shards_of_the_sequence_choose_what_one_device_chooses(name, shards):
  check(name, TEXTS[name], *operands(t=320), mesh=make_mesh(shards, "auto"))


def test_keys_go_around_a_ring_to_queries_that_choose_them():
  mesh = make_mesh(2, "auto")
  check("xattention", TEXTS["xattention"], *operands(t=250, b=1, heads=2,
        kv_heads=1), mesh=mesh, layout=rj.Striped(BLOCK))  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "shards", "layout", "length"),
  [
    ("xattention", 4, rj.Striped(), 333),
    ("flexprefill", 4, rj.Zigzag(), 512),
    ("minference", 2, rj.Contiguous(), 333),
  ],
)
def test_any_layout_chooses_what_one_device_chooses(
  name, shards, layout, length
):
  """Blocks are whole on the shards, or they are exchanged to be."""
  segments = np.ones((2, length), np.int32)
  segments[0, length // 2 :] = 2
  segments[1, -70:] = 0

  def run(layout, **place):
    ordered = lambda x: x
    if layout is not None:
      ordered = lambda x: layout.permute(x, shards=shards)
    results = rj.tile_attention(
      *(jnp.asarray(ordered(x)) for x in operands(t=length)),
      f"{name},block={BLOCK},{TEXTS[name]}",
      is_causal=True,
      layout=layout,
      local_window_size=(259, 0),
      q_segment_ids=jnp.asarray(ordered(segments)),
      logits_soft_cap=3.0,
      sinks=jnp.linspace(-1, 1, 4, dtype=jnp.float32),
      return_residual=True,
      return_tiles=True,
      **place,
    )
    results = jax.device_get(results)
    return results if layout is None else layout.restore(results, shards=shards)

  out, lse, tiles = run(None)
  mesh = make_mesh(shards, "auto")
  sharded_out, sharded_lse, sharded_tiles = run(
    layout, mesh=mesh, axis="seq", strategy="ring"
  )
  np.testing.assert_array_equal(sharded_tiles.chosen, tiles.chosen)
  np.testing.assert_array_equal(sharded_tiles.visible, tiles.visible)
  np.testing.assert_allclose(sharded_out, out, atol=1e-5)
  np.testing.assert_allclose(sharded_lse, lse, atol=1e-5)


@pytest.mark.long
def test_a_threshold_of_one_in_stripes_is_the_dense_ring_to_the_bit():
  mesh, layout = make_mesh(2, "auto"), rj.Striped()
  options = dict(is_causal=True, mesh=mesh, layout=layout, strategy="ring")
  q, k, v = map(jnp.asarray, operands(t=256))
  dense = rj.dot_product_attention(q, k, v, axis="seq", **options)
  out = rj.tile_attention(q, k, v, "xattention,threshold=1", **options)
  np.testing.assert_array_equal(out, dense)


def test_each_block_has_an_owner():
  """Blocks of shards that hold whole ones stay; others are dealt in turn."""
  owners = lambda layout, length: tile_owners(layout, 4, length, 64).tolist()
  assert owners(rj.Contiguous(), 128) == [0, 0, 1, 1, 2, 2, 3, 3]
  assert owners(rj.Striped(64), 128) == [0, 1, 2, 3] * 2
  assert owners(rj.Zigzag(), 128) == [0, 1, 2, 3, 3, 2, 1, 0]
  assert owners(rj.Striped(), 100) == [0, 1, 2, 3] * 2
  assert owners(rj.Zigzag(), 64) == [0, 1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("name", TEXTS)
def test_rows_do_not_depend_on_each_other(name):
  q, k, v = map(jnp.asarray, operands())
  run = lambda *x: rj.tile_attention(
    *x, f"{name},block={BLOCK},{TEXTS[name]}", is_causal=True
  )
  batch = run(q, k, v)
  alone = run(q[1:], k[1:], v[1:])
  np.testing.assert_array_equal(batch[1:], alone)


@pytest.mark.parametrize(
  "text", ["xattention,threshold=1", "flexprefill,gamma=1"]
)
def test_a_threshold_of_one_is_dense_attention_to_the_bit(text):
  q, k, v = map(jnp.asarray, operands())
  dense = rj.dot_product_attention(q, k, v, is_causal=True)
  out = rj.tile_attention(q, k, v, text, is_causal=True)
  np.testing.assert_array_equal(out, dense)


def test_all_tiles_are_counted_at_a_threshold_of_one():
  q, k, v = map(jnp.asarray, operands(t=130, b=1))
  _, tiles = rj.tile_attention(
    q, k, v, rj.XAttention(threshold=1, block=64), is_causal=True,
    return_tiles=True,
  )  # fmt: skip
  np.testing.assert_array_equal(tiles.chosen, tiles.visible)
  assert tiles.visible[0, ::64, 0].tolist() == [1, 2, 3]


@pytest.mark.long
def test_a_number_that_is_not_one_is_not_hidden():
  q, k, v = map(jnp.asarray, operands(b=1))
  q = q.at[0, 200, 0, 0].set(jnp.nan)
  out = rj.tile_attention(
    q, k, v, "xattention,threshold=0.5,block=64", is_causal=True
  )
  assert jnp.isnan(out[0, 200, 0]).all()
  # Neither other heads nor queries before it are touched.
  assert jnp.isfinite(out[0, :192]).all() and jnp.isfinite(out[0, :, 1]).all()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_value_that_no_query_sees_is_of_no_account(value):
  q, k, v = map(jnp.asarray, operands(b=1))
  text = "xattention,threshold=0.5,block=64"
  v = v.at[0, 200].set(value)
  out = rj.tile_attention(q, k, v, text, is_causal=True)
  assert jnp.isfinite(out[0, :200]).all()
  assert not jnp.isfinite(out[0, 200]).any()
  seg = jnp.where(jnp.arange(300) < 200, 1, 0)[None]
  out = rj.tile_attention(
    q, k, v, text, is_causal=True, q_segment_ids=seg, kv_segment_ids=seg
  )
  assert jnp.isfinite(out[0, :200]).all()


@pytest.mark.long
def test_lines_as_long_as_a_gap_of_positions_are_read():
  """Each query's key is 2,000 positions before it, 256 places before it."""
  rng = np.random.default_rng(0)
  code = rng.normal(size=(256, 64)).astype(np.float32)
  noise = 0.01 * rng.normal(size=(256, 64)).astype(np.float32)
  k = np.concatenate([code, noise])[None, :, None]
  v = rng.normal(size=(1, 512, 1, 8)).astype(np.float32)
  number = np.arange(256, dtype=np.int32)
  positions = dict(
    q_positions=2000 + number[None],
    kv_positions=np.concatenate([number, 2000 + number])[None],
  )
  read = lambda attend, *more: attend(
    jnp.asarray(3 * code[None, :, None]),
    jnp.asarray(k),
    jnp.asarray(v),
    *more,
    is_causal=True,
    return_residual=True,
    **positions,
  )[1]
  pattern = "flexprefill,gamma=.9,tau=0,block=64,least_tokens=0"
  left_out = 1 - np.exp(
    read(rj.tile_attention, pattern) - read(rj.dot_product_attention)
  )
  assert left_out.max() < 0.1


@pytest.mark.parametrize(
  ("text", "name"),
  [
    ("xattention,threshold=1.5", "threshold"),
    ("xattention,threshold=-0.1", "threshold"),
    ("xattention,stride=24", "stride"),
    ("xattention,block=100", "block"),
    ("xattention,max_left_out=2", "max_left_out"),
    ("xattention,limit=2", "pattern"),
    ("xattention,threshold=.9,threshold=.5", "pattern"),
    ("flexprefill,gamma=2", "gamma"),
    ("flexprefill,tau=-1", "tau"),
    ("flexprefill,least_tokens=-1", "least_tokens"),
    ("minference,shape=slash", "shape"),
    ("minference,window=-1", "window"),
    ("minference,tokens=-1", "tokens"),
    ("yattention", "pattern"),
    ("", "pattern"),
  ],
)
def test_patterns_that_make_no_sense_are_refused_by_name(text, name):
  with pytest.raises(OptionError, match=f"^{name}: "):
    pattern_of(text)


def test_each_pattern_has_a_definition_here():
  assert {*PATTERNS} == {*CHOICES} == {*TEXTS}


def test_gradients_layouts_and_biases_are_refused_by_name():
  q, k, v = map(jnp.asarray, operands(t=64))
  call = lambda q, **more: rj.tile_attention(
    q, k, v, "xattention", is_causal=True, **more
  )
  with pytest.raises(OptionError, match="gradient"):
    jax.grad(lambda q: call(q).sum())(q)
  with pytest.raises(OptionError, match="layout"):
    call(q, layout=Uneven((40, 24)))
  with pytest.raises(OptionError, match="strategy.*Striped"):
    call(q, layout=rj.Striped(), strategy="ulysses")
  with pytest.raises(OptionError, match="strategy"):
    call(q, strategy="gather")
  with pytest.raises(OptionError, match="bias"):
    call(q, bias=jnp.zeros((1, 1, 64, 64)))
  with pytest.raises(OptionError, match="mask"):
    call(q, mask=rj.Prefix(jnp.asarray([3, 4])))
